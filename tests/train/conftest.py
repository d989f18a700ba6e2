"""The tiny run of `driver.py`, for every test of training."""

from types import ModuleType

import pytest

from tests.train import driver as training_driver


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The driver as a module."""
    return training_driver
