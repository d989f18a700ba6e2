"""What all tests share. Without a GPU, Triton's kernels run in its interpreter, set before anything imports it."""

import functools
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.onnx
from hypothesis import settings

from tests.support import Forked

# A change passes or fails by itself, not by the draw: `make test` draws the same examples, `make fuzz` new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("repeatable")

# The bits of a sum depend on the number of threads: pytest without `make`, and what tests start, have one as well.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# A shell that starts the tests in the background ignores Ctrl-C for them, and so for what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def no_notes_at_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands note the networks of runs in a folder of the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@functools.cache
def share_onnx_operators() -> None:
    """Build torch's table of ONNX operators once per opset: every export builds it anew, which takes a second."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))


@pytest.fixture(scope="session", autouse=True)
def quick_onnx_exports() -> Iterator[None]:
    """The table is shared from the first export on: tests that export nothing do not wait for onnxscript."""
    export = torch.onnx.export

    def prepared(*arguments: object, **options: object) -> object:
        share_onnx_operators()
        return export(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", prepared)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which asks nothing of the network by itself."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs the package playwright")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium found: install Debian's chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-component-update", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, headless=True, args=flags)
        yield started
        started.close()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], Forked]]:
    """Start a function in a process of its own, which is killed with the test."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    started: list[Forked] = []

    def start(function: Callable[[], object]) -> Forked:
        started.append(Forked(function))
        return started[-1]

    yield start
    for process in started:
        process.close()


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
