"""The table over timm and torchvision, on stand-ins for both that do whatever a network may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TIMM = '''
import os, time
import torch
from torch import nn

__version__ = "9.9"

def convs(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 4, 1))

class NeedsValues(nn.Module):
    """Cannot be built on the meta device."""
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1).item()
        self.convs = convs()
    def forward(self, x):
        return {"out": self.convs(x) * self.scale, "more": [x]}

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).requires_grad_(False)

def crash():
    os.abort()

def hang():
    time.sleep(600)

def noisy():
    print("x" * 100_000)
    return convs()

def broken():
    raise RuntimeError("no such thing\\nand more")

NETWORKS = {
    "plain": convs, "values": NeedsValues, "crash": crash, "hang": hang, "noisy": noisy, "broken": broken,
    "mixer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "large": lambda: convs(400), "frozen": Frozen,
}

def list_models():
    return list(NETWORKS)

def create_model(name, pretrained=False):
    network = NETWORKS[name]()
    network.pretrained_cfg = {"input_size": (3, 8, 8)}
    return network
'''


@pytest.fixture
def zoo(tmp_path: Path):
    """Run the benchmark against the stand-ins, and give its record and what it printed."""
    (tmp_path / "timm.py").write_text(TIMM)

    def run(*more: object) -> tuple[dict[str, dict], str]:
        out = tmp_path / "zoo.json"
        options = ["--families", "timm", "--jobs", "2", "--largest", "5000", "--out", out, *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.zoo", *map(str, options)],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        record = json.loads(out.read_text())
        assert record["environment"]["timm"] == "9.9"
        return {row["network"].removeprefix("timm:"): row for row in record["networks"]}, done.stdout

    return run


@pytest.mark.nightly
def test_no_network_takes_the_others_down(zoo):
    rows, printed = zoo("--patience", "60")
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    failed = ("crash", "hang", "broken")
    assert outcomes == {
        **dict.fromkeys(("plain", "values", "noisy", "large"), "converted"),
        **dict.fromkeys(failed, "failed"),
        **dict.fromkeys(("mixer", "frozen"), "nothing to convert"),
    }
    assert [rows[name]["why"].split(":")[0] for name in failed] == [
        "its process ended with -6",
        "took more than 60 s",
        "LowRankError",
    ]
    assert rows["broken"]["why"].endswith("RuntimeError: no such thing")
    assert (rows["plain"]["macs_before"], rows["plain"]["macs_after"]) == (
        64 * (24 + 576 + 32),
        64 * (24 + 192 + 64 + 32),
    )
    assert (rows["plain"]["changed"], rows["plain"]["kept"]) == (1, {"its kernel is 1x1": 2})
    assert "FAILED timm:crash: its process ended with -6" in printed


@pytest.mark.nightly
def test_what_was_not_reached_is_said_and_done_the_next_time(zoo):
    rows, _ = zoo("--budget", "0", "--match", "xe")
    assert {name: row["outcome"] for name, row in rows.items()} == {"mixer": "not reached"}
    rows, _ = zoo("--match", "xe")
    assert rows["mixer"]["outcome"] == "nothing to convert"
    again, _ = zoo("--budget", "0", "--match", "i")
    assert again["mixer"] == rows["mixer"]
    assert again["plain"]["outcome"] == "not reached"
