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

TO_COME = {
    "cli/engines.py",
    "cli/export.py",
    "cli/optimize.py",
    "data/__init__.py",
    "deploy/candidates.py",
    "deploy/chains.py",
    "deploy/engines/__init__.py",
    "deploy/engines/cards.py",
    "deploy/engines/choosing.py",
    "deploy/engines/executorch.py",
    "deploy/engines/mnn.py",
    "deploy/engines/ncnn.py",
    "deploy/engines/onnx_int8.py",
    "deploy/engines/openvino.py",
    "deploy/engines/per_image.py",
    "deploy/engines/precision.py",
    "deploy/engines/runner.py",
    "deploy/engines/targets.py",
    "deploy/engines/torchscript.py",
    "deploy/examples.py",
    "deploy/folding.py",
    "deploy/parity.py",
    "deploy/plan_cache.py",
    "deploy/quantizing.py",
    "deploy/runtime.py",
    "method/channel_order.py",
    "method/conv_form.py",
    "method/costs.py",
    "method/filter_picking.py",
    "method/fitting.py",
    "method/geometry.py",
    "method/inputs.py",
    "method/operations.py",
    "method/references.py",
    "method/rewriting.py",
    "method/selection.py",
    "method/sensitivity.py",
    "method/settling.py",
    "method/shape_choice.py",
    "method/shape_network.py",
    "method/shaping.py",
    "models/googlenet.py",
    "models/network.py",
    "models/network_file.py",
    "models/vgg.py",
    "system/history.py",
}
"""Modules whose tests still stand in other files; the list may only become shorter."""


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
    allowed = WITHOUT.keys() | TO_COME
    assert without_tests() - allowed == set(), "write the test file, or merge the module into the one that uses it"


def test_every_exception_is_a_module_without_tests():
    assert WITHOUT.keys() <= without_tests()
