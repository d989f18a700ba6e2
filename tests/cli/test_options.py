"""Options mean the same in all commands, exist if a text names them, and are those of the commands' functions."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import lowrank_cnn as lr
from lowrank_cnn.cli.app import COMMANDS, load_command

SOURCE = {"--input", "--pretrained", "--width", "--norm", "--into", "--scheme", "--stride", "--classes"}
"""Which network, and of which size."""
AROUND = {"--help", "-h", "--json", "-o", "--out", "--device", "--threads", "--batch"}
"""Where a command runs and what it prints: in Python, tensors and results do that."""
IN_PYTHON_ALONE = {"convert": {"init"}, "plan": {"candidates"}}
"""Functions, which no command line can hold."""
ALIKE = {
    "convert": (lr.convert, {"where": {"--where", "--stage"}, "input_size": {"--input"}}),
    "decompose": (
        lr.decompose,
        {"where": {"--where", "--stage"}, "input_size": {"--input"}, "evaluate": {"--by"}},
    ),
    "count": (lr.count, {"input_size": {"--input", "--example"}}),
    "plan": (lr.plan, {"example_input": {"--input", "--batch", "--example"}}),
    "optimize": (lr.optimize, {"example_input": {"--input", "--batch", "--example"}}),
    "export": (
        lr.export,
        {"path": {"--out"}, "input_size": {"--input"}, "example_input": {"--example"}},
    ),
}
"""For each command its function, and the options for parameters that go by other names."""
FROM_OTHERS = {
    "plan": {"--compile", "--budget", "--twin", "--no-twin", "--engine"},  # of `optimize` and `advise`
    "optimize": {"--overwrite"},  # of `export`
    "export": {"--merge", "--merge-chains"},  # of `merge`
}
"""Options that stand for parameters of other functions which the command calls."""


def test_shared_options_have_one_default_and_all_are_explained():
    defaults: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    devices = {}
    for command in COMMANDS:
        for parameter in load_command(command).params:
            assert parameter.help, (command, parameter.name)
            defaults[parameter.opts[0], parameter.help][command] = repr(parameter.default)
            if parameter.name == "device":
                devices[command] = parameter.default
    for option, by_command in defaults.items():
        assert len(set(by_command.values())) == 1, (option, by_command)
    assert {"train", "evaluate", "predict", "time", "plan", "demo", "reproduce", "frontier"} <= set(devices)
    assert set(devices.values()) == {"auto"}


PACKAGE = Path(lr.__file__).parent
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
    if "--" not in (source := path.read_text()):
        return
    tree = ast.parse(source)
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


def test_every_option_that_is_named_exists() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        known = OWN.get(path.stem, ALL) if path.parent.name == "cli" else ALL
        found |= {f"{path}:{line}": names for line, text in texts(path) if (names := unknown_options(text, known))}
    assert found == {}


@pytest.mark.parametrize("command", ALIKE)
def test_a_command_and_its_function_take_the_same_options(command: str) -> None:
    function, other_names = ALIKE[command]
    options, covered = {name for name in OPTIONS[command] if name.startswith("-")}, set()
    for name in inspect.signature(function).parameters:
        if name in ("model", "say") or name in IN_PYTHON_ALONE.get(command, ()):
            continue
        expected = other_names.get(name, {f"--{name.replace('_', '-')}"})
        assert expected <= options, f"lowrank {command} has no option for {name}"
        covered |= expected | {f"--no-{name}"}
    assert options - covered - SOURCE - AROUND - FROM_OTHERS.get(command, set()) == set()
