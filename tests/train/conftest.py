"""The tiny run of `driver.py`, for every test of training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DRIVER = Path(__file__).with_name("driver.py")
ROOT = DRIVER.parents[2]


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The driver as a module."""
    spec = importlib.util.spec_from_file_location("training_driver", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
