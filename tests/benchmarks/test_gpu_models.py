"""A run that is cut short keeps what it has measured, with processes that only pretend to measure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

CHILD = """
import json, pathlib, sys, time
print("a library says hello")
for ways in ({}, {"dense, torch.compile": {"ms": 2.0}}):
    print(json.dumps({"row": sys.argv[1], "macs": {}, "training": {"ms": ways}}), flush=True)
pathlib.Path(sys.argv[2]).touch()
time.sleep(0 if "quick" in sys.argv[1] else 6000)
sys.exit(3 if "broken" in sys.argv[1] else 0)
"""


@pytest.fixture
def gpu_models(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    module, now = benchmark_module("gpu_models"), [0.0]

    def started(row: str, *_: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, row, str(tmp_path / row.replace("/", "-"))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    class Timer:
        """Ends a slow process once it has printed, however long that takes on a busy machine."""

        def __init__(self, limit: float, kill: Callable[[], None]) -> None:
            self.limit, self.kill = limit, kill

        def start(self) -> None:
            *_, row, printed = self.kill.__self__.args  # type: ignore[attr-defined]
            if row == "slow/lr":
                while not Path(printed).exists():
                    time.sleep(0.01)
                now[0] += self.limit
                self.kill()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(module, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    monkeypatch.setattr(module, "_started", started)
    monkeypatch.setattr(module, "ROWS", ("quick/lr", "slow/lr", "quick-broken/lr"))
    return module


def test_a_row_that_takes_too_long_or_fails_keeps_its_ways(
    gpu_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "gpu_models.json"
    monkeypatch.setattr(sys, "argv", ["gpu_models", "--limit", "1", "--out", str(out)])
    gpu_models.main()
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["row"] for row in run["rows"]] == ["quick/lr", "slow/lr", "quick-broken/lr"]
    assert [row["training"]["ms"] for row in run["rows"]] == [{"dense, torch.compile": {"ms": 2.0}}] * 3
    assert [row.get("failed") for row in run["rows"]] == [None, "took more than 1 s", "exit code 3"]
