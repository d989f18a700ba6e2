"""Run the user's own file for a network or for example inputs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowrank_cnn.system.errors import LowRankError, first_line


def find_example(text: str, *, option: str = "--example") -> Any:
    """The inputs that a function of the user's file gives: a tensor, a tuple, or a dictionary of keywords."""
    path, colon, function = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise LowRankError(f"{option} names a function that gives the inputs, as path.py:function, not {text!r}.")
    return called(function_of(Path(path), function), text)


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """Run the user's own file as `python FILE` would, with imports of its neighbours, for one of its functions."""
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"file_of_the_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[module.__name__] = module  # where dataclasses look for the types they name
    called(lambda: loader.exec_module(module), str(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise LowRankError(f"{path} has no function {function!r}.")
    return make


def called(make: Callable[[], Any], what: str) -> Any:
    """What a function that is not ours gives, or its error in a sentence."""
    try:
        return make()
    except Exception as error:
        raise LowRankError(f"{what} does not run: {type(error).__name__}: {first_line(error)}") from error
