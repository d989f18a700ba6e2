"""Every option that a message, a help text or a docstring of the package names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import lowrank_cnn
from lowrank_cnn.cli.app import COMMANDS, load_command

PACKAGE = Path(lowrank_cnn.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
EXAMPLE = re.compile(r"lowrank ([a-z]+)((?: [^`'\"]*)?)")
OTHER_PROGRAMS = {
    "git": {"--short", "--porcelain", "--untracked-files"},
    "the benchmarks": {"--presets"},
    "tensorboard": {"--logdir"},
    "mnnconvert": {"--modelFile", "--MNNModel", "--bizCode", "--fp16"},
    "trtexec": {"--onnx", "--saveEngine"},
}
FOREIGN = set().union(*OTHER_PROGRAMS.values())


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a module with its line; what an f-string inserts becomes a space."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [part.value if isinstance(part, ast.Constant) else " " for part in node.values]
            yield node.lineno, "".join(map(str, words))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def options(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


OPTIONS = {name: options(load_command(name)) for name in COMMANDS}
ALL = set().union(*OPTIONS.values()) | {"--version"}
OWN: dict[str, set[str]] = {}
"""Options by the file of the package `cli` that has the command."""
for name, entry in COMMANDS.items():
    OWN.setdefault(entry.module, set()).update(OPTIONS[name])


def unknown_options(text: str, known: set[str]) -> set[str]:
    """Options that are not known, and those in an example of a command that are not its own."""
    missing = set()
    for name, rest in EXAMPLE.findall(text):
        if name in OPTIONS:
            missing |= set(OPTION.findall(rest)) - OPTIONS[name]
            text = text.replace(f"lowrank {name}{rest}", "")
    return missing | set(OPTION.findall(text)) - known - FOREIGN


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_option_that_is_named_exists(path: Path) -> None:
    known = OWN.get(path.stem, ALL) if path.parent.name == "cli" else ALL
    found = {f"{path.name}:{line}": names for line, text in texts(path) if (names := unknown_options(text, known))}
    assert found == {}


def test_an_option_that_does_not_exist_is_found() -> None:
    known = {"--out", "--seed"}
    assert unknown_options("choose another --out, or --overwrite it", known) == {"--overwrite"}
    assert unknown_options("try `lowrank evaluate runs/photos --seed 3`", known) == {"--seed"}
    assert unknown_options("train with --seed 3", known) == set()
