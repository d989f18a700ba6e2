"""Benchmarks are modules of a package that is not installed; the tests run from the root of the checkout."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"benchmarks.{name}")


_spec = importlib.util.spec_from_file_location("data_fixtures", Path(__file__).parents[1] / "data" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_data = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_data)
photo, write_shards = _data.photo, _data.write_shards
