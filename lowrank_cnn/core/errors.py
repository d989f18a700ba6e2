"""Errors for users: one sentence that says what is wrong and what to do. Every room validates by `check_...`."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from operator import ge, gt, le, lt
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from lowrank_cnn.core.text import printable

_LONGEST_NAME = 100
"""Letters of a name that are compared with known names: the time to compare grows with their square."""

_FOLDERS = {"onnx_tflite": "/tflite", "lowrank-strips": "/native"}
"""Packages that are installed from a folder of a clone."""


class LowRankError(ValueError):
    """Bad input. The command line prints the sentence and leaves with exit code 2.

    A name within the sentence may be anything: control characters and line ends in it are escaped.

    >>> import lowrank_cnn as lr
    >>> lr.create_model("nin", width=-1)
    Traceback (most recent call last):
    lowrank_cnn.core.errors.LowRankError: width must be a number above 0 and at most 64, not -1.
    """

    def __str__(self) -> str:
        return printable(super().__str__()).replace("\n", "\\n")


class LowRankWarning(UserWarning):
    """One sentence about something unexpected. The command line prints it without a place in the code."""


class LostDeviceError(LowRankError):
    """A kernel has crashed the device: this process can no longer use it."""


class UnknownOptionError(LowRankError, TypeError):
    """A function was called with a keyword that it does not have; the sentence names the nearest one."""


class MissingExtra(LowRankError):
    """An optional dependency is not installed; the sentence names the `pip install` to run.

    >>> import lowrank_cnn as lr
    >>> issubclass(lr.MissingExtra, lr.LowRankError)
    True
    """


_commands: list[str] = []
"""What the command line runs, if it is the one that hears the messages; else Python code does."""


@contextmanager
def on_command_line() -> Iterator[None]:
    """Within the block, messages name options as the command line writes them, in every thread."""
    _commands.append("lowrank")
    try:
        yield
    finally:
        _commands.pop()


def to_caller(python: str, command: str) -> str:
    """The part of a message that is said in two ways: to Python code, and on the command line."""
    return command if _commands else python


def option(name: str, value: object = None) -> str:
    """An option for a message, with its value unless that is None: `batch_size=8`, or `--batch-size 8`."""
    dashed = "--" + {"num_classes": "classes", "example_input": "example"}.get(name, name).replace("_", "-")
    if value is None:
        return to_caller(name, dashed)
    return to_caller(f"{name}={value!r}", dashed if value is True else f"{dashed} {value}")


def setting(name: str, value: object) -> str:
    """A field of the recipe for a message: `holdout=0.1`, or `--set holdout=0.1`."""
    text = str(value).lower() if isinstance(value, bool) else "" if value == () else value
    return to_caller(f"{name}={value!r}", f"--set {name}={text}")


def require(module: str, *, extra: str, purpose: str = "this") -> ModuleType:
    """Import an optional dependency where it is used, or say in one line how to get it.

    ONNX Runtime and OpenVINO send telemetry and store an identifier at home as soon as they are imported: both are
    told not to. OpenVINO and NNCF have no setting for it, but do without the package if it cannot be imported.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The module may lack a package that it imports: torch.utils.tensorboard needs TensorBoard.
        package = (error.name or module).partition(".")[0]
        raise missing_extra(purpose, package, extra) from error


def missing_extra(purpose: str, package: str, extra: str = "") -> MissingExtra:
    """The error for a missing package, with the command that installs it from where this package came from.

    That is a clone, or a folder or wheel that pip installed from. The package index comes last.
    """
    clone = Path(__file__).parents[2]
    origin = str(clone) if (clone / "pyproject.toml").is_file() else _installed_from()
    if origin and Path(origin).is_dir() and Path(origin).samefile("."):
        origin = "."
    if folder := _FOLDERS.get(package):
        what = shlex.quote(origin + folder) if origin else f".{folder} in a clone of lowrank-cnn"
    else:
        what = shlex.quote(f"{origin or 'lowrank-cnn'}[{extra}]")
    return MissingExtra(f"{purpose} needs {package}: pip install {what}")


def _installed_from() -> str:
    """The folder or wheel that pip installed this package from, if it still exists; else empty."""
    try:
        record = importlib.metadata.distribution("lowrank-cnn").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return ""
    place = unquote(urlsplit(json.loads(record or "{}").get("url", "")).path)
    return place if place and Path(place).exists() else ""


def check_type(name: str, value: object, *kinds: type) -> None:
    """Refuse a value of another type. None counts as a type, and True does not count as an int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise LowRankError(f"{name} must be of type {wanted}, not {value!r:.60}.")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
) -> None:
    """Refuse a value that is not a number within these limits, as True and NaN.

    >>> check_number("dropout", 1.5, least=0, below=1)
    Traceback (most recent call last):
    lowrank_cnn.core.errors.LowRankError: dropout must be a number of at least 0 and below 1, not 1.5.
    """
    limits = (("of at least", least, ge), ("above", above, gt), ("at most", most, le), ("below", below, lt))
    asked = [(words, limit, holds) for words, limit, holds in limits if limit is not None]
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not all(holds(value, limit) for _, limit, holds in asked):
        wanted = " and ".join(f"{words} {limit:,}" for words, limit, _ in asked)
        shown = f"{value:,}" if right else f"{value!r:.60}"
        raise LowRankError(f"{name} must be a {'whole ' if whole else ''}number {wanted}, not {shown}.")


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Refuse a value that is not one of the known ones. Of more than four, the nearest are named."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return
    if len(known) > 4:
        raise LowRankError(f"there is no {name} {value!r:.60}; {nearest(value, known)}")
    raise LowRankError(f"{name} must be {' or '.join(known)}, not {value!r:.60}.")


def check_file(path: Path) -> None:
    """Refuse a path without a file. A file that cannot be read is refused by its reader."""
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")


_F = TypeVar("_F", bound=Callable[..., Any])


def names_options(**meant: str) -> Callable[[_F], _F]:
    """Decorate a public function: if a keyword is unknown, the error names the parameter that is meant.

    `meant` has the parameters for words that other libraries use, as `@names_options(learning_rate="lr")`.
    """

    def decorate(function: _F) -> _F:
        known = signature(function).parameters

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if unknown := next((name for name in options if name not in known), None):
                hint = f"did you mean {meant[unknown]}?" if unknown in meant else nearest(unknown, known)
                raise UnknownOptionError(f"{function.__name__} has no option {unknown!r}; {hint}")
            return function(*args, **options)

        return cast(_F, call)

    return decorate


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known names, or all if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name)[:_LONGEST_NAME], names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."


def first_line(error: BaseException) -> str:
    """The first line of an error without colours and full stop; its type if the message is empty."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return plain.strip().partition("\n")[0].rstrip(".") or type(error).__name__


@contextmanager
def explained(sentence: str) -> Iterator[None]:
    """Turn any error of foreign code into one sentence: "the network does not run: division by zero."

    A user's forward, an engine or a tool may fail in any way of its own. A `LowRankError` passes unchanged.
    """
    try:
        yield
    except LowRankError:
        raise
    except Exception as error:
        raise LowRankError(f"{sentence}: {first_line(error)}.") from error
