"""Every option that a message, a help text or a docstring of the package names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

import lowrank_cnn
from lowrank_cnn.cli.app import build

PACKAGE = Path(lowrank_cnn.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMAND = re.compile(r"lowrank ([a-z]+)((?: [^`'\"]*)?)")
FOREIGN = {"--short", "--porcelain", "--untracked-files", "--presets"}
"""Options of git and of the benchmarks, which messages name too."""


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
    found = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    for child in getattr(command, "commands", {}).values():
        found |= options(child)
    return found


ROOT = get_command(build())
COMMANDS: dict[str, click.Command] = ROOT.commands  # type: ignore[attr-defined]
OWN: dict[str, set[str]] = {}
"""Options by the file of the package `cli` that adds the command."""
for command in COMMANDS.values():
    assert command.callback is not None
    OWN.setdefault(command.callback.__module__.rpartition(".")[2], set()).update(options(command))


def unknown_options(text: str, known: set[str]) -> set[str]:
    """Options that are not known, and those in an example of a command that are not its own."""
    missing = set()
    for name, rest in COMMAND.findall(text):
        if name in COMMANDS:
            missing |= set(OPTION.findall(rest)) - options(COMMANDS[name])
            text = text.replace(f"lowrank {name}{rest}", "")
    return missing | set(OPTION.findall(text)) - known - FOREIGN


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_option_that_is_named_exists(path: Path) -> None:
    known = OWN.get(path.stem, options(ROOT)) if path.parent.name == "cli" else options(ROOT)
    found = {f"{path.name}:{line}": names for line, text in texts(path) if (names := unknown_options(text, known))}
    assert found == {}


def test_an_option_that_does_not_exist_is_found() -> None:
    known = {"--out", "--seed"}
    assert unknown_options("choose another --out, or --overwrite it", known) == {"--overwrite"}
    assert unknown_options("try `lowrank evaluate runs/photos --seed 3`", known) == {"--seed"}
    assert unknown_options("train with --seed 3", known) == set()
