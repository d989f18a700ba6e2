"""The tiny run of `driver.py`, for every test of training."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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


@pytest.fixture
def program():
    """Start the driver as a program: its arguments in, a process out; killed if it still runs at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, str(DRIVER), *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
