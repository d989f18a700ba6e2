"""The demo in miniature."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lowrank_cnn.cli import demo as module
from lowrank_cnn.cli.demo import demo
from lowrank_cnn.deploy.timing import time_model
from lowrank_cnn.train import load_record


def test_it_trains_both_twins_once_compares_them_and_writes_a_report(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.deploy.timing.time_model", partial(time_model, repeats=3))
    monkeypatch.setattr(module, "WIDTH", 0.05)
    said: list[str] = []
    (dense, low_rank), report = demo(tmp_path, epochs=1, device="cpu", limit=64, say=said.append)
    assert [line.split(" network")[0] for line in said] == ["Training the dense", "Training the low-rank"]
    assert (dense.name, low_rank.name) == ("dense", "low-rank")
    assert low_rank.macs < 0.6 * dense.macs
    assert low_rank.params < dense.params
    assert min(dense.ms_per_image, low_rank.ms_per_image) > 0
    assert load_record(tmp_path / "low-rank" / "record.json").result["macs"] == low_rank.macs
    assert "nin lr width 0.05" in report.read_text()

    before = (tmp_path / "dense" / "record.json").stat().st_mtime_ns
    monkeypatch.setattr("lowrank_cnn.report.write_report", lambda runs, page: page)
    (again, _), _ = demo(tmp_path, epochs=1, device="cpu", limit=64)
    assert again.top1 == dense.top1
    assert (tmp_path / "dense" / "record.json").stat().st_mtime_ns == before


def test_the_command_prints_the_ratios(output_of, monkeypatch):
    twins = [
        module.TwinResult(*row) for row in (("dense", 0.9, 500, 200, 50, 2.0), ("lr", 0.91, 500, 100, 20, 1.5))
    ]
    monkeypatch.setattr(module, "demo", lambda *_, **__: (twins, Path("report.html")))
    assert "+1.0 points x 0.50 x 0.40 x 0.75" in " ".join(output_of("demo").split())


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_a_device_that_is_none_is_one_sentence(lowrank, device: str, tmp_path):
    assert "no device" in str(lowrank("demo", "--device", device, "--out", tmp_path).exception)
