"""The record of engines: rows replace earlier ones of the same way to run, and the fastest is found."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

import lowrank_cnn as lr
from benchmarks import cpu_engines, int8_accuracy
from lowrank_cnn.core import clock


def row(engine: str, ms: float, network: str = "dense") -> dict[str, object]:
    return {"family": "nin", "precision": "fp32", "threads": 2, "network": network, "engine": engine, "ms": ms}


def test_rows_are_added_and_replaced(tmp_path):
    path = tmp_path / "record.json"
    cpu_engines.add(path, [row("ncnn", 3.0), row("mnn", 2.0)])
    cpu_engines.add(path, [row("ncnn", 1.0)])
    rows = cpu_engines.recorded(path)
    assert [(each["engine"], each["ms"]) for each in rows] == [("mnn", 2.0), ("ncnn", 1.0)]
    assert cpu_engines.best(rows, network="dense", precision="fp32") == row("ncnn", 1.0)
    assert cpu_engines.best(rows, network="thin") is None


def test_the_thin_network_has_the_macs_of_the_low_rank_one():
    size = cpu_engines.size_of("nin")
    macs = {way: lr.count(cpu_engines.network("nin", way), size).macs for way in cpu_engines.WAYS}
    assert macs["thin"] == pytest.approx(macs["low-rank"], rel=0.1)
    assert macs["low-rank"] < 0.6 * macs["dense"]


def test_the_interval_counts_images_that_only_one_answers():
    before, after = torch.ones(1000, dtype=torch.bool), torch.ones(1000, dtype=torch.bool)
    after[:10] = False
    found = int8_accuracy.paired(before, after)
    assert (found["n"], found["only_float"], found["only_int8"]) == (1000, 10, 0)
    assert found["loss"] == pytest.approx(1.0)
    assert found["low"] < 1.0 < found["high"]
    assert 0.3 < found["low"] < 0.5


def test_work_of_other_processes_is_counted():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        found, own, others = cpu_engines.cores_used(lambda: time.sleep(0.5) or "result", patience=0)
        busy.kill()
    assert found == "result"
    assert others > 0.2
    assert own < 0.2


def test_an_engine_that_uses_more_threads_than_it_was_given_is_refused():
    assert cpu_engines.refusal(1, own=1.78, others=0.01) == "it used 1.78 cores for 1 threads"
    assert cpu_engines.refusal(2, own=1.78, others=0.01) == ""
    assert cpu_engines.refusal(2, own=1.78, others=0.5) == "others used 0.50 cores"


def test_fast_networks_warm_up_as_long_as_slow_ones(monkeypatch):
    monkeypatch.setattr(clock, "_clock", lambda run, _: run())
    assert cpu_engines.warm_runs({"slow": lambda: 100.0}) == 2
    assert cpu_engines.warm_runs({"slow": lambda: 100.0, "fast": lambda: 2.0}) == 15
