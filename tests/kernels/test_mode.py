"""How to choose: the environment, and blocks around code."""

from __future__ import annotations

import threading

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels import device as mode
from lowrank_cnn.kernels import for_graphs, forced


def test_an_unknown_mode_is_refused():
    with pytest.raises(LowRankError, match="LOWRANK_KERNELS"), forced("fast"):
        pass


def test_a_block_goes_before_the_environment(monkeypatch):
    monkeypatch.delenv("LOWRANK_KERNELS", raising=False)
    assert mode.mode() == "auto"
    monkeypatch.setenv("LOWRANK_KERNELS", "off")
    assert mode.mode() == "off"
    with forced("on"):
        assert mode.mode() == "on"
    assert mode.mode() == "off"
    monkeypatch.setenv("LOWRANK_KERNELS", "fast")
    with pytest.raises(LowRankError, match="LOWRANK_KERNELS is off, dense, on, auto, not 'fast'"):
        mode.mode()


def test_off_and_dense_both_mean_torch():
    found = {}
    for chosen in mode.MODES:
        with forced(chosen):
            found[chosen] = mode.by_torch()
    assert found == {"off": True, "dense": True, "on": False, "auto": False}


def test_a_survey_collects_and_can_be_ignored():
    assert mode.survey() is None
    with mode.surveying() as asked:
        mode.survey().append(1)
        with mode.unsurveyed():
            assert mode.survey() is None
    assert asked == [1]


def test_another_thread_can_take_the_settings_along(monkeypatch):
    monkeypatch.delenv("LOWRANK_KERNELS", raising=False)
    found = []

    def run(settings):
        found.append((mode.mode(), mode.is_for_graphs()))
        with settings:
            found.append((mode.mode(), mode.is_for_graphs()))

    with forced("off"), for_graphs():
        thread = threading.Thread(target=run, args=(mode.as_now(),))
        thread.start()
        thread.join()
    assert found == [("auto", False), ("off", True)]
