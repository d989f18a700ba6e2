"""Plans carried out: the order, the controls and the resuming, with made-up runs."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.choose import target as targets
from lowrank_cnn.choose import trace as tracing
from lowrank_cnn.choose.candidates import FAMILIES, Builder, Design
from lowrank_cnn.choose.frontier import ANSWERS, RECORD, DesignTime, Frontier, load_frontier, pack
from lowrank_cnn.choose.runs import DesignRun, RunMaker, RunOutcome
from lowrank_cnn.choose.trace import FrontierPlan, Tracer, trace_frontier, width_of_time
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data
from lowrank_cnn.deploy.optimize import reoptimize
from lowrank_cnn.train import get_recipe
from tests.support import assert_equal_weights

SMALL = {"batch_size": 32, "epochs": 1, "crop": 12}
taught: list[Any] = []
"""The teachers of the runs that were made up."""


@pytest.fixture
def trace(tmp_path: Path, squares: Data) -> Callable[..., Frontier]:
    """Traces a frontier of airbench on small images, without a word."""

    def traced(plan: FrontierPlan, *, family="airbench", out="", settings=None, say=lambda _: None) -> Frontier:
        how = {"settings": {**SMALL, **(settings or {})}, "device": "cpu", "say": say}
        return trace_frontier(family, squares, tmp_path / out, plan, **how)

    return traced


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Runs and times without any training: what was asked for is listed."""
    done: list[tuple] = []
    taught.clear()

    def train(self: RunMaker, run: DesignRun) -> RunOutcome:
        data, teacher = self._images_and_teacher(run.held_out)
        done.append((run.design.name, run.seed, run.rate))
        taught.append(teacher)
        if run.design.name == "separable":
            return RunOutcome(2.0)  # the loss was not finite
        right = torch.arange(len(data.test)) % 4 != (run.seed if run.rate == 1 else 0)
        return RunOutcome(2.0, pack(right), int(right.sum()) / len(right), 64.0, 0.5)

    def time(self: Tracer, design: Design) -> DesignTime:
        done.append((design.name, "timed"))
        ms = design.width**2 * design.last * (1.0 if design.dense else 0.8 if design.where == "late" else 0.5)
        return DesignTime(ms, ms, ms, 1.0, self.plan.batch, "folded")

    def apart(_file: str, _function: str, *asked: Any) -> dict[str, float]:
        return {design["name"]: 2.0 for design, _ in asked[-1]}

    monkeypatch.setattr(RunMaker, "__call__", train)
    monkeypatch.setattr(Tracer, "time", time)
    monkeypatch.setattr(tracing, "apart", apart)
    return done


def test_every_design_gets_its_first_run_before_any_gets_a_second(trace, made_up: list):
    plan = FrontierPlan(("lr",), (0.75,), match=(), seeds=2, batch=0)
    trace(plan)
    names = ["dense", "dense@0.75", "lr"]
    assert made_up == [(name, seed, 1.0) for seed in (1, 2) for name in names]


def test_what_is_done_is_not_done_again(trace, made_up: list, tmp_path: Path, monkeypatch):
    plan = FrontierPlan(("lr",), match=(), seeds=2)
    whole = RunMaker.__call__

    def cut(self: RunMaker, run: DesignRun) -> RunOutcome:
        if run.seed == 2:
            raise KeyboardInterrupt
        return whole(self, run)

    monkeypatch.setattr(RunMaker, "__call__", cut)
    with pytest.raises(KeyboardInterrupt):
        trace(plan)
    assert sum(len(row.runs) for row in load_frontier(tmp_path).rows) == 2
    made_up.clear()
    monkeypatch.setattr(RunMaker, "__call__", whole)
    trace(plan)
    assert made_up == [("dense", 2, 1.0), ("lr", 2, 1.0)]
    made_up.clear()
    found = trace(plan)
    assert made_up == []
    assert [run.row for row in found.rows for run in row.runs] == [0, 2, 1, 3]


def test_designs_are_matched_by_macs(trace, made_up: list):
    found = trace(FrontierPlan(("lr-branches",), match=("macs",), seeds=0, batch=0))
    rows = {row.design.matched: row for row in found.rows}
    low_rank, thin = found.row("lr-branches"), rows["macs of lr-branches"]
    assert thin.macs == pytest.approx(low_rank.macs, rel=0.15)
    assert thin.name.startswith("dense-branches@")


@pytest.mark.parametrize(
    ("device", "designs", "matched"),
    [
        ("cpu", ("lr",), {"time of lr": {"dense@0.71875"}}),
        ("cuda", ("lr",), {"time of lr": {"dense-64s@0.71875"}}),
        # `dense-2x` is dense as well: its time is kept apart from those of `dense`.
        ("cpu", ("lr@2", "lr-late", "dense-2x"), {"time of lr-late": {"dense@0.90625"}}),
    ],
)
def test_designs_are_matched_by_time(trace, made_up: list, monkeypatch, device, designs, matched):
    opened = tracing.open_frontier
    monkeypatch.setattr(tracing, "open_frontier", lambda at, about, n: opened(at, {**about, "device": device}, n))
    found = trace(FrontierPlan(designs, match=("time",), seeds=0))
    for reason, names in matched.items():
        assert {row.name for row in found.rows if row.design.matched == reason} == names


@pytest.mark.nightly
def test_a_network_of_the_record_is_the_control_if_it_has_the_same_filters(trace, made_up: list):
    matched = FrontierPlan(("lr",), match=("macs",), seeds=1, batch=0)
    control = trace(matched, out="one").rows[-1]
    near = FrontierPlan((), (control.design.width + 0.002,), match=(), seeds=0, batch=0)
    trace(near, out="two")
    found = trace(matched, out="two")
    same = [row for row in found.rows if (row.macs, row.params) == (control.macs, control.params)]
    assert [len(row.runs) for row in same] == [1]


def test_times_of_other_batches_are_refused(trace, made_up: list):
    trace(FrontierPlan(match=(), seeds=0, batch=8))
    with pytest.raises(LowRankError, match="holds times of batches of 8 images, not 16: say batch=8"):
        trace(FrontierPlan(match=(), seeds=0, batch=16))
    trace(FrontierPlan(match=(), seeds=0, batch=0))


def test_a_design_with_runs_keeps_its_rate(trace, made_up: list):
    trace(FrontierPlan(match=(), seeds=1, batch=0))
    made_up.clear()
    plan = FrontierPlan(("lr",), match=(), seeds=2, batch=0, rates=(2.0,))
    found = trace(plan)
    assert made_up == [("lr", 1000, 2.0), ("lr", 1, 2.0), ("dense", 2, 1.0), ("lr", 2, 2.0)]
    assert [row.rate for row in found.rows] == [1.0, 2.0]


def test_settings_are_tried_alike_on_images_held_out(trace, made_up: list):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, rates=(0.5, 1.0, 2.0), tries=2)
    found = trace(plan)
    names, seeds = ("dense", "lr"), (1000, 1001)
    tries = [(name, seed, rate) for name in names for rate in plan.rates for seed in seeds]
    assert made_up == [*tries, ("dense", 1, 1.0), ("lr", 1, 1.0)]
    assert [row.rate for row in found.rows] == [1.0, 1.0]
    assert [one["torch"] for one in found.environments] == [torch.__version__]


@pytest.mark.parametrize(
    ("rates", "more"),
    [
        ((0.5, 1.0, 2.0, 4.0), []),  # 1 is the best for dense networks, and 2 for others
        ((1.0, 2.0), [0.5, 4.0]),
        ((4.0, 8.0), [2.0, 1.0]),
        ((0.25, 0.125), [0.5, 1.0]),  # twice at most
        ((1.0,), []),  # nothing to choose from
    ],
)
def test_while_a_best_rate_is_at_the_edge_all_networks_try_the_next_one(
    trace, made_up: list, monkeypatch, rates, more
):
    def train(_: RunMaker, run: DesignRun) -> RunOutcome:
        made_up.append((run.design.name, run.rate))
        correct = round(10 - abs(log2(run.rate / (1 if run.design.dense else 2))))
        return RunOutcome(2.0, pack(torch.arange(20) < correct), correct / 20, 64.0, 0.5)

    monkeypatch.setattr(RunMaker, "__call__", train)
    plan = FrontierPlan(("lr",), match=(), seeds=0, batch=0, rates=rates)
    trace(plan)
    tried = [rate for name, rate in made_up if name == "dense"]
    assert tried == [*sorted(rates), *more]
    assert [rate for name, rate in made_up if name == "lr"] == tried
    made_up.clear()
    trace(dataclasses.replace(plan, seeds=1))
    assert len(made_up) == 2  # runs alone
    made_up.clear()
    found = trace(dataclasses.replace(plan, designs=("lr", "strips5")))
    assert [name for name, _ in made_up] == len(tried) * ["strips5"]  # the tries that the others had
    assert {tuple(sorted(one.rate for one in row.tries)) for row in found.rows} == {tuple(sorted(tried))}


def test_a_record_with_runs_tries_further_rates_if_they_are_asked_for(trace, made_up: list, monkeypatch):
    def train(_: RunMaker, run: DesignRun) -> RunOutcome:
        made_up.append((run.design.name, run.seed, run.rate))
        correct = round(10 - abs(log2(run.rate / (1 if run.design.dense else 2))))
        return RunOutcome(2.0, pack(torch.arange(20) < correct), correct / 20, 64.0, 0.5)

    monkeypatch.setattr(RunMaker, "__call__", train)
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, rates=(1.0,))
    trace(plan)
    made_up.clear()
    found = trace(dataclasses.replace(plan, rates=(2.0,), seeds=2))
    assert made_up == [("dense", 1000, 2.0), ("lr", 1000, 2.0), ("lr", 1, 2.0), ("dense", 2, 1.0), ("lr", 2, 2.0)]
    assert [(row.rate, len(row.runs)) for row in found.rows] == [(1.0, 2), (2.0, 2)]
    assert [found.right_answers(row).sum(1).tolist() for row in found.rows] == [[10, 10], [10, 10]]


def test_a_teacher_is_trained_first_and_teaches_dense_networks_too(trace, made_up: list):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, base=0.25, teacher="dense@0.5")
    trace(plan)
    assert made_up == [("dense", 1, 1.0), ("lr", 1, 1.0)]
    [network] = {teacher.network for teacher in taught}
    trace(dataclasses.replace(plan, seeds=2))
    later = taught[-1].network
    assert later is not network
    assert_equal_weights(later, network)  # the teacher of the first runs
    with pytest.raises(LowRankError, match=r"whose teacher is dense@0\.5, not none"):
        trace(FrontierPlan(batch=0, base=0.25))


def test_a_run_whose_loss_is_not_finite_is_kept_in_mind(trace, made_up: list):
    plan = FrontierPlan(("separable",), match=(), seeds=1, batch=0)
    lines: list[str] = []
    for _ in range(2):
        found = trace(plan, say=lines.append)
    assert found.rows[1].failed == [1]
    assert [name for name, *_ in made_up] == ["dense", "separable"]
    assert "2/2  separable seed 1: the loss was not finite; 0 s left" in lines


def test_nothing_is_begun_once_the_time_is_over(trace, made_up: list, tmp_path: Path):
    lines: list[str] = []
    trace(FrontierPlan(("lr",), seeds=3, batch=0, match=(), budget=1e-9), say=lines.append)
    assert made_up == []
    assert "continues from here" in lines[-1]
    assert (tmp_path / RECORD).exists()


def test_another_recipe_is_refused_in_the_same_folder(trace, made_up: list):
    plan = FrontierPlan(match=(), seeds=0, batch=0)
    trace(plan)
    with pytest.raises(LowRankError, match=r"whose recipe lr is 1\.5, not 3\.0"):
        trace(plan, settings={"lr": 3})


@pytest.mark.nightly
def test_runs_side_by_side_find_what_runs_alone_find(trace, tmp_path: Path):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, base=0.25, rates=(0.5, 1.0))
    lines: list[str] = []
    both = trace(dataclasses.replace(plan, processes=2), out="both", say=lines.append)
    alone = trace(plan, out="alone")
    assert (tmp_path / "both" / ANSWERS).read_bytes() == (tmp_path / "alone" / ANSWERS).read_bytes()
    for ours, theirs in zip(both.rows, alone.rows, strict=True):
        assert (ours.rate, ours.tries) == (theirs.rate, theirs.tries)
        assert [run.sha256 for run in ours.runs] == [run.sha256 for run in theirs.runs]
        assert [(run.seconds, run.processes) for run in ours.runs] == [(None, 2)]
        assert all(run.seconds and run.processes == 1 for run in theirs.runs)
    assert lines[-1].startswith("2/2  lr seed 1: ")
    assert "beside others" in lines[-1]
    assert load_frontier(both.folder).rows == both.rows


@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_in_another_process_finds_the_same(squares: Data, held_out: bool):
    """What another process gets is a pickled copy."""
    builder = Builder.of_family(FAMILIES["airbench"], (1, 12, 12), 2, base=0.25)
    maker = RunMaker(builder, squares, get_recipe("cifar10-fast", **SMALL), "cpu")
    run = DesignRun(Design("dense"), 3, 0.5, held_out)
    copy = pickle.loads(pickle.dumps(maker))
    ours, theirs = (dataclasses.replace(do(run), wall=0, images_per_second=0) for do in (maker, copy))
    assert ours == theirs
    assert ours.right is not None
    assert len(ours.right) == (1 if held_out else 3)  # bytes of 6 and of 20 images


def test_designs_are_timed_in_turns_in_three_processes_each_in_the_form_it_had(trace, monkeypatch):
    known: list[dict[str, Any]] = []

    def folded(network: nn.Module, images: torch.Tensor, **_: object) -> nn.Module:
        form = {"choice": "folded, contiguous", "times": {"folded, contiguous": 1.0}, "ways": {}}
        return reoptimize(network, {**form, "input": [*images.shape]})

    def apart(_file: str, function: str, *asked: Any) -> dict[str, float]:
        asked = json.loads(json.dumps(asked))
        known.append({design["name"]: timing["choice"] for design, timing in asked[-1]})
        with monkeypatch.context() as patch:
            patch.setattr(targets, "optimize", None)  # no search in a process
            return getattr(tracing, function)(*asked)

    monkeypatch.setattr(targets, "optimize", folded)  # it is tested elsewhere, and takes its time
    monkeypatch.setattr(tracing, "apart", apart)
    found = trace(FrontierPlan(("lr",), match=(), seeds=0, batch=2, repeats=3, base=0.25))
    dense, low_rank = (row.timing for row in found.rows)
    for one in (dense, low_rank):
        assert 0 < one.low <= one.ms <= one.high
        assert (one.batch, one.tries, len(one.processes)) == (2, {"folded, contiguous": 1.0}, 3)
    assert known == 3 * [{"dense": "folded, contiguous", "lr": "folded, contiguous"}]
    assert dense.ratio == 1.0
    ms = [dense_ms for _, dense_ms in low_rank.processes]
    assert low_rank.ratio == median(ours / theirs for ours, theirs in low_rank.processes)
    assert found.ms(found.rows[1]) == low_rank.ratio * median(ms)


@pytest.mark.nightly
def test_a_process_of_its_own_times_networks(trace, monkeypatch):
    monkeypatch.setattr(tracing, "PROCESSES", 1)
    found = trace(FrontierPlan(("lr",), match=(), seeds=0, batch=2, repeats=3, base=0.25, compile=False))
    (dense, _), (low_rank, reference) = (row.timing.processes[0] for row in found.rows)
    assert reference == dense
    assert found.rows[1].timing.ratio == low_rank / dense


def test_timing_in_processes_goes_on_where_it_was_cut(trace, made_up: list, monkeypatch):
    plan, lines = FrontierPlan(("lr",), match=(), seeds=1), []
    spent = iter([False])  # for one process
    monkeypatch.setattr(Tracer, "_spent", property(lambda _: next(spent, True)))
    assert [len(row.timing.processes) for row in trace(plan, say=lines.append).rows] == [1, 1]
    assert "continues from here" in lines[-1]
    monkeypatch.setattr(Tracer, "_spent", False)
    assert [len(row.timing.processes) for row in trace(plan, say=lines.append).rows] == [3, 3]
    assert lines.count("2 networks in turns, in a process of their own") == 3
    assert made_up[2:] == [("dense", 1, 1.0), ("lr", 1, 1.0)]
    found = trace(dataclasses.replace(plan, designs=("strips5",)))
    assert [len(row.timing.processes) for row in found.rows] == [6, 6, 3]  # a new one, in turns with all


@pytest.mark.parametrize(
    ("measured", "target", "width"),
    [
        ({1.0: 4.0, 0.5: 1.0}, 2.25, 0.75),
        ({1.0: 4.0}, 1.0, 0.5),
        ({1.0: 4.0, 0.5: 1.0}, 16.0, 2.0),
        ({1.0: 0.05}, 1.0, 4.0),  # the widest there is
    ],
)
def test_a_width_is_found_by_time(measured: dict, target: float, width: float):
    assert width_of_time(measured, target) == width
