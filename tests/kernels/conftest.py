"""The model of a Hopper GPU, for the tests of its kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def hopper_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hopper_model", Path(__file__).with_name("hopper_model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
