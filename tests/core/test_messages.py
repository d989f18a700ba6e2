"""Messages of the library: options in the words of whoever called."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowrank_cnn as lr
from lowrank_cnn.cli.app import run
from lowrank_cnn.core.errors import on_command_line, option, setting
from tests.support import ROOT

PACKAGE = ROOT / "lowrank_cnn"
SURFACE = json.loads((ROOT / "tests" / "golden" / "surface.json").read_text())
OPTIONS = {word for words in SURFACE["commands"].values() for all in words for word in all.split("/")}
PARAMETERS = {word for words in SURFACE["names"].values() for word in re.findall(r"\w+", str(words))}
COMMANDS_ONLY = ("cli/*.py", "report/figures.py")
"""Files whose messages are written for the command line."""
OTHER_TOOLS = re.compile(
    r"--(short|porcelain|untracked-files|modelFile|MNNModel|bizCode|saveEngine)|^--[a-z0-9]+$|^lowrank "
)


def libraries() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path.match(str(PACKAGE / pattern)) for pattern in COMMANDS_ONLY):
            yield path, ast.parse(path.read_text())


def called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def plain_texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Texts that are said as they are: no docstrings, and not the two ways in which `to_caller` says something."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if called(child) == "to_caller":
            continue
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child
        yield from plain_texts(child)


def test_no_message_names_an_option_for_one_caller_alone():
    fields = "|".join(sorted({*SURFACE["recipe"], *(w.lstrip("-").replace("-", "_") for w in OPTIONS)} - {"lr"}))
    python = re.compile(rf"(?<!\w)({fields})=(True|False|[\d'])")
    for path, tree in libraries():
        for text in plain_texts(tree):
            command = re.search(r"(^|[^\w-])--[a-z]", text.value) and not OTHER_TOOLS.search(text.value)
            assert not command, f"{path}:{text.lineno} speaks to the command line alone: {text.value!r}"
            assert not python.search(re.sub(r"\w\(.*\)", "", text.value)), (
                f"{path}:{text.lineno} speaks to Python alone: {text.value!r}"
            )


def test_every_option_that_messages_name_exists_in_both_places():
    found = set()
    for path, tree in libraries():
        for node in ast.walk(tree):
            if (kind := called(node)) in ("option", "setting") and path.name != "errors.py":
                name = node.args[0]  # type: ignore[attr-defined]
                if isinstance(name, ast.Constant):
                    found.add((kind, str(name.value)))
    assert len(found) > 15
    for kind, name in sorted(found):
        if kind == "setting":
            assert name in SURFACE["recipe"], name
        else:
            with on_command_line():
                assert option(name) in OPTIONS, name
            assert name in {*PARAMETERS, *SURFACE["recipe"], "best"}, name  # load_checkpoint(best=True)


def test_the_caller_hears_its_own_words(tmp_path, capsys):
    assert (option("batch_size", 8), setting("mirror", True)) == ("batch_size=8", "mirror=True")
    with on_command_line():
        assert (option("batch_size", 8), option("resume", True)) == ("--batch-size 8", "--resume")
        assert (option("example_input"), option("num_classes")) == ("--example", "--classes")
        assert (setting("mirror", True), setting("accumulate", 1)) == ("--set mirror=true", "--set accumulate=1")
    (tmp_path / "net.safetensors").touch()
    with pytest.raises(lr.LowRankError, match="exists; overwrite=True replaces it"):
        lr.export(lr.create_model("nin", width=0.1), tmp_path / "net.safetensors")
    assert run(["export", "nin", str(tmp_path / "net.safetensors"), "--width", "0.1"]) == 2
    assert "exists; --overwrite replaces it" in " ".join(capsys.readouterr().err.split())
    assert option("out") == "out"  # after the command, Python is spoken to again
