"""The fastest of the engines is named and its file is written."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy import choose_engine as choosing
from lowrank_cnn.deploy.choose_engine import EngineTimes, time_engines
from lowrank_cnn.deploy.engines.targets import open_engine


def test_the_fastest_file_is_written(tiny, tmp_path, monkeypatch):
    timed_as(monkeypatch, {"onnx, fp32": 2.0, "torchscript, fp32": 1.0})
    found = time_engines(tiny, (3, 12, 12), engines=["onnx", "torchscript"], precisions=["fp32"], out=tmp_path)
    assert found.fastest == "torchscript, fp32"
    assert list(found.times) == ["torchscript, fp32", "onnx, fp32"]
    assert found.path == str(tmp_path / "net.ts")
    assert open_engine(found.path, trusted=True).engine


def timed_as(monkeypatch, *turns: dict[str, float | Sample]) -> list[list[str]]:
    """Let processes report these times, one turn after the other; what each was asked for."""
    asked: list[list[str]] = []

    def apart(_file, _function, files, *_):
        asked.append(list(files))
        ms = turns[sum(set(before) == set(files) for before in asked[:-1])]
        samples = [ms[k] if isinstance(ms[k], Sample) else Sample(ms[k], ms[k], ms[k], 3) for k in files]
        return {label: astuple(sample) for label, sample in zip(files, samples, strict=True)}

    monkeypatch.setattr(choosing, "apart", apart)
    return asked


def test_each_engine_has_a_process_of_its_own_and_an_unsteady_time_is_taken_again(tiny, monkeypatch):
    """In one process the threads of engines disturb each other: ncnn took 31.6 ms in place of 2.7."""
    pt2, script = "pt2, fp32", "torchscript, fp32"
    first = {pt2: Sample(9.0, 2.0, 12.0, 3), f"rival: {pt2}": 5.0, script: 4.0, f"rival: {script}": 4.0}
    again, said = {pt2: Sample(3.0, 2.9, 3.1, 3), f"rival: {pt2}": Sample(7.0, 2.0, 9.0, 3)}, []
    asked = timed_as(monkeypatch, first, again)
    how = {"engines": ["pt2", "torchscript"], "precisions": ["fp32"], "say": said.append}
    found = time_engines(tiny, (3, 12, 12), rival=tiny, **how)
    assert asked == [[pt2, f"rival: {pt2}"], [script, f"rival: {script}"], [pt2, f"rival: {pt2}"]]
    assert {label: time.ms for label, time in found.times.items()} == {pt2: 3.0, script: 4.0}
    assert found.rival[pt2].ms == 5.0, "the steadier of both times is kept"
    assert said[:2] == ["pt2, fp32: 9.00 ms, unsteady", "rival: pt2, fp32: 5.00 ms"]
    assert len(said) == 6


def test_an_engine_that_ends_its_process_is_left_out(tiny, monkeypatch):
    def ends(*_):
        raise LowRankError("its process ended")

    monkeypatch.setattr(choosing, "apart", ends)
    with pytest.raises(LowRankError, match="no engine runs this network: its process ended"):
        time_engines(tiny, (3, 12, 12), engines=["torchscript"], precisions=["fp32"])


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


def test_the_verdict_names_the_winner_and_unsteady_times():
    unsteady = {"ncnn, fp16": Sample(2.0, 1.0, 4.0, 3)}
    assert "Some times are unsteady" in EngineTimes(unsteady, {}, None).verdict
    times = {"ncnn, fp16": Sample(2.0, 1.9, 2.1, 3)}
    assert EngineTimes(times, {}, None).verdict == "Fastest here: ncnn, fp16 (2.00 ms)."
    rival = {"ncnn, fp32": Sample(4.0, 3.9, 4.1, 3)}
    assert EngineTimes(times, {}, None, rival).verdict.endswith("this one takes 0.50 of its time.")


def test_engines_that_refuse_are_named(tiny):
    with pytest.raises(LowRankError, match="no engine runs this network"):
        time_engines(tiny.half(), (3, 12, 12), engines=["onnx"], precisions=["fp16"])
