"""A run that is cut short keeps what it has measured, with processes that only pretend to measure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CHILD = """
import json, sys, time
print("a library says hello")
for ways in ({}, {"dense, torch.compile": {"ms": 2.0}}):
    print(json.dumps({"row": sys.argv[1], "macs": {}, "training": {"ms": ways}}), flush=True)
time.sleep(0 if "quick" in sys.argv[1] else 60)
sys.exit(3 if "broken" in sys.argv[1] else 0)
"""


@pytest.fixture
def gpu_models(benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = benchmark_module("gpu_models")

    def started(row: str, *_: object) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", CHILD, row], stdout=subprocess.PIPE, text=True)

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
