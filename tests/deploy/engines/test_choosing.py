"""The fastest of the engines is named and its file is written."""

from __future__ import annotations

import pytest

from lowrank_cnn.deploy.engines import choosing, open_engine
from lowrank_cnn.deploy.engines.choosing import time_engines
from lowrank_cnn.system.clock import Sample
from lowrank_cnn.system.errors import LowRankError


def test_the_fastest_file_is_written(tiny, tmp_path, monkeypatch):
    ms = {"onnx, fp32": 2.0, "torchscript, fp32": 1.0}
    monkeypatch.setattr(choosing, "measure", lambda runs, **_: {k: Sample(ms[k], 1.0, 2.0, 3) for k in runs})
    found = time_engines(tiny, (3, 12, 12), engines=["onnx", "torchscript"], precisions=["fp32"], out=tmp_path)
    assert found.fastest == "torchscript, fp32"
    assert list(found.times) == ["torchscript, fp32", "onnx, fp32"]
    assert found.path == str(tmp_path / "net.ts")
    assert open_engine(found.path, trusted=True).engine


def test_engines_that_refuse_are_named(tiny):
    with pytest.raises(LowRankError, match="no engine runs this network"):
        time_engines(tiny.half(), (3, 12, 12), engines=["onnx"], precisions=["fp16"])
