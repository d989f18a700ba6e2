"""The fastest of the engines is named and its file is written."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.deploy.engines import choosing, open_engine
from lowrank_cnn.deploy.engines.choosing import EngineTimes, engine_for, time_engines
from lowrank_cnn.system.clock import Sample
from lowrank_cnn.system.errors import LowRankError


def test_the_fastest_file_is_written(tiny, tmp_path, monkeypatch):
    timed_as(monkeypatch, {"onnx, fp32": 2.0, "torchscript, fp32": 1.0})
    found = time_engines(tiny, (3, 12, 12), engines=["onnx", "torchscript"], precisions=["fp32"], out=tmp_path)
    assert found.fastest == "torchscript, fp32"
    assert list(found.times) == ["torchscript, fp32", "onnx, fp32"]
    assert found.path == str(tmp_path / "net.ts")
    assert open_engine(found.path, trusted=True).engine


def timed_as(monkeypatch, ms: dict[str, float]) -> None:
    monkeypatch.setattr(choosing, "measure", lambda runs, **_: {k: Sample(ms[k], 1.0, 2.0, 3) for k in runs})


def test_the_rival_of_equal_cost_is_timed_beside_and_int8_is_not_kept(tiny, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    timed_as(
        monkeypatch, {"onnx, fp32": 2.0, "onnx, int8": 1.0, "rival: onnx, fp32": 3.0, "rival: onnx, int8": 0.5}
    )
    how = {"engines": ["onnx"], "precisions": ["fp32", "int8"], "out": tmp_path}
    found = time_engines(tiny, (3, 12, 12), rival=tiny, **how)
    assert found.fastest == "onnx, int8"
    assert list(found.rival) == ["onnx, int8", "onnx, fp32"]
    assert open_engine(found.path).metadata.get("precision") != "int8"  # calibrated on noise, it stays behind
    assert "int8 needs real images" in found.verdict
    assert "takes 0.50 ms (onnx, int8): it is faster (this one takes 2.00 of its time)" in found.verdict


def test_the_verdict_names_the_winner():
    times = {"ncnn, fp16": Sample(2.0, 1.9, 2.1, 3)}
    assert EngineTimes(times, {}, None).verdict == "Fastest here: ncnn, fp16 (2.00 ms)."
    rival = {"ncnn, fp32": Sample(4.0, 3.9, 4.1, 3)}
    assert EngineTimes(times, {}, None, rival).verdict.endswith("this one takes 0.50 of its time.")


def test_auto_takes_the_fastest_engine(tiny, monkeypatch):
    example = torch.zeros(1, 3, 12, 12)
    assert engine_for(tiny, example, "onnx") == ("onnx", "fp32")
    fastest = EngineTimes({"ncnn, fp16": Sample(2.0, 1.9, 2.1, 3)}, {}, None)
    monkeypatch.setattr(choosing, "time_engines", lambda *_, **__: fastest)
    assert engine_for(tiny, example, "auto") == ("ncnn", "fp16")


def test_engines_that_refuse_are_named(tiny):
    with pytest.raises(LowRankError, match="no engine runs this network"):
        time_engines(tiny.half(), (3, 12, 12), engines=["onnx"], precisions=["fp16"])
