"""Find the command that was typed, run it, and turn every way in which it ends into an exit code.

Modules of commands are imported when their command is used, and torch when it begins to work: help and completion
answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import groupby, zip_longest
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from lowrank_cnn.cli import CTRL_C, INTERRUPTED
from lowrank_cnn.core import __version__
from lowrank_cnn.core.errors import LowRankError, LowRankWarning, on_command_line
from lowrank_cnn.core.processes import first_process

# Standard output that outlives its reader: `lowrank train ... | head -1` trains to the end. Plain warnings.


class LastingStream:
    """A text stream that drops what cannot be written any more. `error` is the first failure but a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._closed = stream, False
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        """After a failure, discard the rest, and what the stream has buffered: Python flushes it at exit."""
        if self._closed:
            return
        try:
            call()
        except OSError as error:
            self._closed = True
            self.error = error if error.errno != errno.EPIPE else None
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[LastingStream]:
    """Let both standard streams outlive their readers, and write unprintable characters as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out, err = LastingStream(sys.stdout), LastingStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
        try:
            yield out
        finally:
            out.flush()
            err.flush()


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print our own warnings as one sentence, without the file and line where they arise.

    Each is printed once: a command may open a set again, in the size that the network is for.
    """
    told: set[str] = set()

    def show(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, LowRankWarning):
            usual(message, category, *place, **options)
        elif first_process() and str(message) not in told:
            from lowrank_cnn.cli.show import errors  # help and completion do without rich

            told.add(str(message))
            errors.print(str(message))

    with warnings.catch_warnings():
        # torch works without numpy, and an install without extras does not bring it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        usual, warnings.showwarning = warnings.showwarning, show
        yield


BAD_INPUT = 2
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class Entry(NamedTuple):
    """A line of `lowrank --help`: the module with the function `NAME_command`, the panel, the first sentence."""

    module: str
    panel: str
    summary: str


COMMANDS = {
    "demo": Entry("compare", "Start", "Compare a dense network with a thinner and a low-rank one on digits."),
    "compare": Entry("compare", "Start", "Say which cheap version of a network to train."),
    "models": Entry("models", "Start", "List the networks with their cost and published accuracy."),
    "count": Entry("models", "Start", "Count multiply-accumulates, parameters and memory, layer by layer."),
    "data": Entry("data", "Train", "Check a data set: counts, sizes, classes, duplicates, unreadable images."),
    "recipes": Entry("models", "Train", "List the training recipes."),
    "train": Entry("train", "Train", "Train a network, from scratch or from trained weights."),
    "evaluate": Entry("evaluate", "Train", "Measure accuracy on test images."),
    "predict": Entry("evaluate", "Train", "Classify image files."),
    "report": Entry("report", "Train", "Write one HTML page about training runs and timings."),
    "convert": Entry("convert", "Convert", "Rewrite the convolutions of any network with low-rank filters."),
    "decompose": Entry("convert", "Convert", "Approximate trained convolutions by low-rank filters."),
    "thin": Entry("convert", "Convert", "Make a thinner network: fewer channels in every layer."),
    "design": Entry("compare", "Convert", "Advise whether low-rank filters, fewer filters or both are faster."),
    "time": Entry("plan", "Deploy", "Time networks layer by layer, beside their dense twins."),
    "plan": Entry("plan", "Deploy", "Find the fastest way to run a network on this machine."),
    "optimize": Entry("plan", "Deploy", "Find the fastest form of a network, and write it to a file."),
    "export": Entry("export", "Deploy", "Write a network for ONNX Runtime and other engines, and check the file."),
    "audit": Entry("paper", "Paper", "Compare every published figure and claim with what this code computes."),
    "reproduce": Entry("paper", "Paper", "Train the paper's networks and compare their accuracy."),
    "frontier": Entry("frontier", "Paper", "Train a network over widths and schemes: accuracy against time."),
    "figure": Entry("report", "Paper", "Draw a figure of the paper."),
}


class LazyGroup(TyperGroup):
    """A group that lists its commands from the table above and imports only the one that is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.summary))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, names in groupby(COMMANDS, key=lambda name: COMMANDS[name].panel):
            with formatter.section(panel):
                formatter.write_dl([(name, COMMANDS[name].summary) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Print the last words of a run that was stopped; its exit code depends on the signal, unlike typer's."""
        try:
            with on_command_line():
                return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            from lowrank_cnn.cli.show import errors

            if str(stopped) and first_process():
                errors.print(str(stopped))
            raise typer.Exit(getattr(stopped, "exit_code", INTERRUPTED)) from stopped


def with_default_weights(words: list[str]) -> list[str]:
    """Write --pretrained without a value as --pretrained default: typer has no options whose value may be absent.

    >>> with_default_weights(["timm:resnet18", "--pretrained", "--data", "photos"])
    ['timm:resnet18', '--pretrained', 'default', '--data', 'photos']
    """
    found: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue="-"):
        found.append(word)
        if word == "--pretrained" and (following.startswith("-") or ":" in following):  # an option, or the network
            found.append("default")
    return found


class Command(TyperCommand):
    """A command in which --pretrained may have no value, and whose help groups the options by their panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_default_weights(args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def load_command(name: str) -> TyperCommand:
    """Import the module of a command and build the command from its function."""
    entry = COMMANDS[name]
    function = getattr(import_module(f"lowrank_cnn.cli.{entry.module}"), f"{name}_command")
    app = typer.Typer(add_completion=False, **_PLAIN)
    text = inspect.cleandoc(function.__doc__ or "").replace("\n\n  ", "\n\n\b\n  ")  # \b: click keeps the lines
    app.command(name, cls=Command, help=text, context_settings=_SETTINGS)(function)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return command


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)]


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(name="lowrank", cls=LazyGroup, context_settings=_SETTINGS, **_PLAIN)

    @app.callback(
        invoke_without_command=True, epilog="Try: lowrank demo, lowrank models, lowrank count vgg11-gmp-lr."
    )
    def show_help(context: typer.Context, version: Version = False) -> None:
        """Cheaper convolutional networks: low-rank filters learned from scratch, and the time they save."""
        if context.invoked_subcommand is None:
            print(context.get_help())

    return app


def run(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments, those of the process by default, and return its exit code."""
    with lasting_output() as lost, plain_warnings():
        try:
            code = build()(args=arguments, prog_name="lowrank", standalone_mode=False)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except Exception as error:
            code = INTERRUPTED if CTRL_C.received else _explain(error)
    if lost.error is not None and not code:
        return _fail(f"standard output could not be written: {lost.error.strerror}.", code=1)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Print an error the user can do something about, and return the exit code. Others are raised again."""
    if hasattr(error, "format_message"):  # only usage errors have it: an unknown option, say
        if getattr(getattr(error, "ctx", None), "info_name", "") == "train":
            from lowrank_cnn.cli.train import is_setting

            name = str(getattr(error, "option_name", "")).lstrip("-")
            if is_setting(field := name.removeprefix("no-").replace("-", "_")):
                value = "false" if name.startswith("no-") else "VALUE"
                return _fail(f"--{name} is a setting: --set {field}={value}.")
        from typer import rich_utils

        rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        return int(getattr(error, "exit_code", BAD_INPUT))
    if sentence := _sentence(error):
        return _fail(sentence)
    raise error


def _sentence(error: Exception) -> str:
    """The sentence for the user about an error; empty for a fault of this program."""
    if isinstance(error, LowRankError):
        return str(error)
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "too many files are open: use fewer --workers, or raise the limit with `ulimit -n 4096`."
    if isinstance(error, OSError):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}."
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:60]!a} holds half of a surrogate pair, which no file can store: rename it."
    from lowrank_cnn.core.environment import is_out_of_memory

    if is_out_of_memory(error):
        return "there is not enough memory: use a smaller --batch-size or --limit."
    return ""


def _fail(sentence: str, *, code: int = BAD_INPUT) -> int:
    from lowrank_cnn.cli.show import console, errors

    console.file.flush()
    errors.print(f"lowrank: {sentence}")
    return code
