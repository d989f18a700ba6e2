"""Tests mirror the package: `lowrank_cnn/a/b.py` is tested by `tests/a/test_b.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lowrank_cnn"
WITHOUT = {
    "_moved.py": "tests/test_package.py imports every old path",
    "cli/__init__.py": "every test in tests/cli starts the command through it",
}
"""Modules without a test file of their own, each with the reason."""


def defines(path: Path) -> bool:
    """Whether a module defines a function or a class; an `__init__` that hands names on does not."""
    nodes = ast.parse(path.read_text()).body
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "__getattr__" for node in nodes)


def mirror_of(module: Path) -> Path:
    """Where the tests of a module are: those of `a/__init__.py` in `a/test_a.py`."""
    inside = module.relative_to(PACKAGE)
    name = inside.parent.name if inside.name == "__init__.py" else inside.stem
    return ROOT / "tests" / inside.parent / f"test_{name}.py"


def without_tests() -> set[str]:
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"]
    return {str(path.relative_to(PACKAGE)) for path in paths if defines(path) and not mirror_of(path).exists()}


def test_every_module_has_its_test_file():
    assert without_tests() - WITHOUT.keys() == set(), "write the test file, or merge the module into its user"


def test_every_exception_is_a_module_without_tests():
    assert WITHOUT.keys() <= without_tests()
