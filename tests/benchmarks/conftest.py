"""Benchmarks are programs; the tests load them by their file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


_spec = importlib.util.spec_from_file_location("data_fixtures", Path(__file__).parents[1] / "data" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_data = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_data)
photo, write_shards = _data.photo, _data.write_shards
