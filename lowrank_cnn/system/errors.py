"""Errors for users: one sentence that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

from lowrank_cnn.system.text import printable


class LowRankError(ValueError):
    """Bad input. The command line prints the sentence and leaves with exit code 2.

    A name within the sentence may come from a file of somebody else's: control characters in it are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class LostDeviceError(LowRankError):
    """A kernel has stopped the device, and with it all that this process could still do there."""


class MissingExtra(LowRankError):
    """An optional dependency is not installed; the sentence names the `pip install` to run."""


def require(module: str, *, extra: str, purpose: str = "this") -> ModuleType:
    """Import an optional dependency where it is used, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # What is missing may be what the module itself wants: TensorBoard, to write scalars with torch.
        package = (error.name or module).partition(".")[0]
        raise MissingExtra(f"{purpose} needs {package}: pip install 'lowrank-cnn[{extra}]'") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known ones, or all where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."
