"""Put the commands together, run one, and turn every way in which it ends into an exit code."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer import rich_utils

from lowrank_cnn.cli import INTERRUPTED
from lowrank_cnn.cli.output import lasting_output
from lowrank_cnn.cli.show import console, errors
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.version import __version__

COMMANDS = (
    "models",
    "audit",
    "train",
    "evaluate",
    "convert",
    "deploy",
    "demo",
    "reproduce",
    "frontier",
    "shrink",
    "report",
)
"""The files of this package that add commands, in the order of the help text."""
BAD_INPUT = 2

_EPILOG = """Try: [bold]lowrank models[/], [bold]lowrank count vgg11-gmp-lr[/], [bold]lowrank audit[/]."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments, those of the process by default, and return its exit code."""
    with lasting_output() as lost:
        code = _run(arguments)
    if lost.error is not None and not code:
        return _fail(f"standard output could not be written: {lost.error.strerror}.", code=1)
    return code


def _run(arguments: list[str] | None) -> int:
    try:
        code = build()(args=arguments, prog_name="lowrank", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except LowRankError as error:
        return _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return _fail(f"{what}{error.strerror or error}.")
    except MemoryError:
        return _fail("there is not enough memory: use a smaller --batch-size or --limit.")
    except Exception as error:
        if not hasattr(error, "format_message"):  # which errors of usage have
            raise
        return _show_usage_error(error)


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="lowrank", pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False
    )

    @app.callback(invoke_without_command=True, epilog=_EPILOG)
    def show_help(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        """Cheaper convolutional networks: low-rank filters learned from scratch, and the time they save."""
        if version:
            print(__version__)
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    for command in COMMANDS:
        import_module(f"lowrank_cnn.cli.{command}").add_to(app)
    return app


def _show_usage_error(error: Any) -> int:
    """An unknown option, say, with the usage of the command, as typer shows it."""
    rich_utils.rich_format_error(error)
    return int(getattr(error, "exit_code", BAD_INPUT))


def _fail(sentence: str, *, code: int = BAD_INPUT) -> int:
    console.file.flush()
    errors.print(f"lowrank: {sentence}", markup=False, soft_wrap=True)
    return code
