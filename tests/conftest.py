"""Without a GPU, Triton's kernels run in its interpreter; it must be told so before anything imports Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# A change passes or fails by itself, not by the draw: `make test` draws the same examples, `make fuzz` new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def program(request: pytest.FixtureRequest):
    """Start the `driver.py` beside or above a test: arguments in, a process out, killed with the test."""
    places = (folder / "driver.py" for folder in request.path.parents)
    driver, started = next(path for path in places if path.exists()), []

    def start(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        root = Path(__file__).resolve().parent.parent
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, str(driver), *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
