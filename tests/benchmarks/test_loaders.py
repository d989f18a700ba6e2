"""The loaders' benchmark measures every way, alone and under a network, and keeps other machines' entries."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.fixture
def measured(benchmark_module, write_shards, photo, tmp_path, monkeypatch):
    """The record of a run over a few small photographs, into a file that has an entry of another machine."""
    rows = [(photo(number, size=(64, 64)), 0) for number in range(48)]
    write_shards(tmp_path / "small", "train", [rows[:2]])
    write_shards(tmp_path / "small", "test", [rows])
    loaders, out = benchmark_module("loaders"), tmp_path / "loaders.json"
    for name, value in (("CROP", 32), ("SIDE", 37)):
        monkeypatch.setattr(loaders, name, value)
    out.write_text(json.dumps({"machines": [{"environment": {"cpu": "another", "gpu": None}}]}))
    words = ["--images", "16", "--photographs", "1", "--batch", "2", "--repeats", "1", "--workers", "0"]
    words += ["--data", str(tmp_path / "small"), "--network", "nin-c3-lr", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["loaders", *words])
    loaders.main()
    return json.loads(out.read_text())


def test_every_way_has_its_rate_and_idle_share(measured):
    other, machine = measured["machines"]
    assert other["environment"]["cpu"] == "another"
    assert {"full size", "shrunk once", "held as bytes", "held as floats"} <= machine["rows"].keys()
    for row in machine["rows"].values():
        assert row["lowest"] <= row["images_per_second"] <= row["highest"]
        assert row["seconds_before"] >= 0
        assert 0 <= row["idle"] < 1
