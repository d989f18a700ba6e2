"""The command `lowrank`: thin functions that parse, call the library and print."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from lowrank_cnn.cli.show import errors
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.version import __version__

COMMANDS = ("models", "audit", "train", "evaluate", "convert", "deploy", "demo", "reproduce", "shrink", "report")
"""The files of this package that add commands, in the order of the help text."""

_EPILOG = """Try: [bold]lowrank models[/], [bold]lowrank count vgg11-gmp-lr[/], [bold]lowrank audit[/]."""


def main() -> None:
    """Run the command; bad input is one sentence and exit code 2."""
    try:
        _app()()
    except LowRankError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader of our output left (`| head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _app() -> typer.Typer:
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


def _fail(sentence: str) -> None:
    errors.print(f"lowrank: {sentence}", markup=False, soft_wrap=True)
    sys.exit(2)
