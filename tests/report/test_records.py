from __future__ import annotations

from dataclasses import replace

import pytest

from lowrank_cnn.report.records import NetworkId, NetworkResult, Records, Run, TimedNetwork, by_seed
from lowrank_cnn.train.run_folder import Epoch

RUN = Run("a", NetworkId("nin"), "cifar10", "", "r", 1, "finished", "test", 0.9, None, 10, 5, 60.0, ())
TIME = TimedNetwork("t", NetworkId("nin"), "CPU", "torch", 8, 16.0, 10, 5, ())


def test_runs_of_one_seed_count_once():
    runs = [RUN, replace(RUN, top1=0.8), replace(RUN, seed=2, top1=0.7), replace(RUN, seed=3, top1=None)]
    assert by_seed(runs, "top1") == pytest.approx([0.85, 0.7])
    found = NetworkResult(RUN.network, runs=tuple(runs))
    assert (found.seeds, found.top1) == (2, pytest.approx(0.775))


def test_unfinished_runs_count_only_where_none_has_finished():
    running = replace(RUN, status="running", top1=0.1)
    assert NetworkResult(RUN.network, runs=(RUN, running)).top1 == 0.9
    alone = NetworkResult(RUN.network, runs=(running,))
    assert (alone.top1, alone.finished, alone.top1_spread) == (0.1, False, None)


def test_the_fastest_way_by_image_is_the_time_of_a_network():
    found = NetworkResult(
        TIME.network, timings=(TIME, replace(TIME, batch=1, ms=3.0), replace(TIME, device="GPU"))
    )
    assert (best := found.time("CPU")) is not None
    assert best.ms_per_image == 2.0
    assert (single := found.time("CPU", batch=1)) is not None
    assert single.ms == 3.0
    assert found.time("TPU") is None
    assert (found.macs, found.params, found.n) == (10, 5, None)


def test_over_fitting_is_training_accuracy_above_test_accuracy():
    epoch = Epoch(1, None, None, 0.95, None, None, None)
    assert replace(RUN, history=(epoch,)).overfit == pytest.approx(0.05)
    assert RUN.overfit is None


def test_records_are_kept_by_their_kind():
    found = Records()
    assert not found
    found.add(RUN)
    found.add(TIME)
    assert (found.runs, found.timings, bool(found)) == ([RUN], [TIME], True)
    assert NetworkId("nin", scheme="lr", width=0.5, stride=2).label == "nin lr width 0.5 stride 2"
