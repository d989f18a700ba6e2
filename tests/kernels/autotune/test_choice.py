"""What the choice rests on: times in graphs and in calls, and results that must be torch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.core.cache import JsonCache
from lowrank_cnn.kernels import device as mode
from lowrank_cnn.kernels import for_graphs
from lowrank_cnn.kernels.autotune import choice, tuned
from lowrank_cnn.kernels.autotune.choice import Choice
from lowrank_cnn.kernels.autotune.trial import OUT_OF_MEMORY, WRONG
from lowrank_cnn.kernels.autotune.tuned import FAILED, DensePath, Request, Times
from lowrank_cnn.kernels.conv.hopper_plan import HopperTile
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import pose
from tests.kernels.helpers import PADDING

PLAN = KernelPlan("tiled", Tile(pixels=32, filters=16, depth=16))
OTHER = KernelPlan("tiled", Tile(pixels=64, filters=16, depth=16))


def problem(channels=8, pool=None, stride=(1, 1)):
    shapes = [(8, channels, 3, 1), (8, channels, 1, 3)]
    return pose((2, channels, 6, 5), shapes, torch.float32, stride=stride, padding=PADDING, relu=True, pool=pool)


def test_graphs_and_calls_choose_by_their_own_times():
    entry = {
        "torch": {"graph": 0.2, "call": 0.3},
        "fused": {"graph": 0.1, "call": 0.9},
        "plan": str(PLAN),
    }
    called = choice._choice(entry)
    assert not called.fused
    assert "in a call: fused 0.900 ms" in called.why
    with for_graphs():
        recorded = choice._choice(entry)
    assert recorded.fused
    assert recorded.plan == PLAN
    assert "in a graph: fused 0.100 ms" in recorded.why


class Bench:
    """Stands for a GPU: what each path takes on it (None is torch's own), and whether its results are right.

    `alone` has the times of layers of one group: those that a layer as one dense conv asks for. `placed` says
    whether such a dense conv gives the layer's results.
    """

    def __init__(self) -> None:
        self.taken: dict[KernelPlan | DensePath | None, Times | None] = {
            None: Times(2.0, 2.0),
            PLAN: Times(1.0, 1.0),
            DensePath(PLAN): Times(1.5, 1.5),
        }
        self.alone: dict[KernelPlan | DensePath | None, Times | None] = {
            None: Times(2.0, 2.0),
            PLAN: Times(1.0, 1.0),
        }
        self.right: dict[KernelPlan, bool | None] = {PLAN: True}
        self.placed: bool | None = True
        self.measured = 0

    def times(self, request: Request, plan: KernelPlan | DensePath | None) -> Times | None:
        self.measured += 1
        return (self.taken if len(request.problem.groups) > 1 else self.alone)[plan]

    def mismatch(self, request: Request, plan: KernelPlan | DensePath) -> str:
        right = self.placed if isinstance(plan, DensePath) else self.right[plan]
        return "" if right else OUT_OF_MEMORY if right is None else WRONG

    def choose(self, *, training: bool = False) -> Choice:
        asked = Request(problem(), torch.device("cuda"), training)
        return choice._stored(asked) or choice._measured(asked)

    def tune(self) -> Choice | None:
        with mode.tuning():
            return choice._measured(Request(problem(), torch.device("cuda")))


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setenv("LOWRANK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choice, "plans_of", lambda *_: tuple(made.right))
    monkeypatch.setattr(choice, "refusal", lambda _: None)
    monkeypatch.setattr(choice, "times", made.times)
    monkeypatch.setattr(choice, "mismatch", made.mismatch)
    start_anew()
    yield made
    start_anew()


def stored_entries() -> dict:
    """What the file holds, as a new process reads it."""
    path = tuned.store_path()
    return JsonCache(path, key=path.stem, valid=bool).entries


def start_anew() -> None:
    """As a new process does."""
    tuned.entries.cache_clear()
    tuned._this_run.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_measured_holds_in_later_runs(bench, fails: bool):
    if fails:
        bench.taken[PLAN] = FAILED
    for _ in range(2):
        assert bench.choose().fused is not fails
        start_anew()
    assert bench.measured == 2


@pytest.mark.parametrize("short", ["torch", "fused", "results"])
def test_running_out_of_memory_is_forgotten(bench, short):
    taken, right = dict(bench.taken), dict(bench.right)
    if short == "results":
        bench.right[PLAN] = None
    else:
        bench.taken[None if short == "torch" else PLAN] = None
    for _ in range(2):  # once in a run: it does without that path until its end
        assert bench.choose().fused is (short == "torch")
    assert bench.measured == (1 if short == "results" else 2)
    assert not tuned.store_path().exists()
    start_anew()
    bench.taken, bench.right = taken, right
    assert bench.choose().fused
    assert "Infinity" not in tuned.store_path().read_text()


@pytest.mark.parametrize(("by_torch", "searched"), [(2.5, [False]), (1.5, [False, True])])
def test_cudnn_searches_only_where_that_may_decide(bench, monkeypatch, by_torch, searched):
    """And not under the settings by which torch keeps what was found without a search."""
    cudnn, seen = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "benchmark", True)
    bench.taken[None] = Times(by_torch, by_torch)

    def times(request: Request, plan: KernelPlan | None) -> Times | None:
        seen.extend([] if plan else [(cudnn.benchmark, cudnn.allow_tf32)])
        return bench.times(request, plan)

    monkeypatch.setattr(choice, "times", times)
    before = cudnn.allow_tf32
    assert choice._measured(Request(replace(problem(), dtype=torch.bfloat16), torch.device("cuda"))).fused
    assert seen == [(search, before is search) for search in searched]
    assert (cudnn.benchmark, cudnn.allow_tf32) == (True, before)


def test_where_nothing_can_be_measured_nothing_is_stored(bench):
    bench.taken = {None: None, PLAN: FAILED}
    assert choice._measured(Request(problem(), torch.device("cuda"))) is None
    assert not tuned.entries().entries
    assert not tuned._this_run


@pytest.mark.parametrize("short", ["taken", "right"])
def test_tuning_without_memory_leaves_what_was_stored(bench, short):
    bench.choose()
    before = dict(stored_entries())
    bench.taken[OTHER], bench.right[OTHER] = Times(0.5, 0.5), True
    getattr(bench, short)[OTHER] = None
    bench.tune()
    assert stored_entries() == before
    assert bench.choose().plan == PLAN
    bench.taken[OTHER], bench.right[OTHER] = Times(0.5, 0.5), True
    bench.tune()
    assert bench.choose().plan == OTHER
    [entry] = stored_entries().values()
    assert entry["tuned"]


def test_a_plan_that_computes_zeros_is_measured_beside_a_plain_one(bench):
    """Without tuning: products with zeros may not pay."""
    padded = KernelPlan("enclosed", HopperTile())
    bench.right = {padded: True, PLAN: True, OTHER: True}
    bench.taken |= {padded: Times(1.5, 1.5)}
    assert choice.in_question(Request(problem(), torch.device("cpu"))) == [padded, PLAN]
    assert bench.choose().plan == PLAN  # OTHER has no time: measuring it would be an error


def test_a_tuned_plan_is_not_looked_for_again(bench):
    bench.taken[OTHER], bench.right[OTHER] = Times(0.5, 0.5), True
    bench.alone[OTHER] = Times(1.5, 1.5)
    bench.tune()
    before = bench.measured
    with mode.tuning():
        found = choice._measured(Request(problem(), torch.device("cuda"), training=True))
    assert found.plan == OTHER
    # Itself and torch, in training; as one dense conv, for which both plans, one of them and torch are measured.
    assert bench.measured == before + 2 + 1 + 4


def test_a_layer_trains_as_one_dense_conv_if_that_is_faster(bench):
    bench.taken[DensePath(PLAN)] = Times(0.9, 0.5)
    for _ in range(2):
        found = bench.choose(training=True)
        assert (found.dense, found.fused, found.plan) == (True, False, None)
        assert found.why == "measured, in a call: fused 1.000 ms, torch 2.000 ms, dense 0.500 ms"
        start_anew()
    assert bench.measured == 5  # the three paths, and the dense conv by both of its own
    said = choice.explain(problem(), torch.device("cuda"), training=True)
    assert "as one dense conv (measured, in a call: fused 1.000 ms, torch 2.000 ms, dense 0.500 ms)" in said
    assert f"3x3,16 /1x1,relu float32: fused {PLAN} (measured" in said
    assert choice.fastest(problem(), torch.device("cuda"), training=True) == 0.5
    # In a graph it is another choice.
    bench.taken[DensePath(PLAN)] = Times(1.1, 0.5)
    tuned.entries().entries.clear()
    with for_graphs():
        assert bench.choose(training=True).plan == PLAN
    assert bench.choose(training=True).dense


def test_the_dense_conv_runs_by_torch_where_that_is_faster(bench):
    bench.alone[None] = Times(0.5, 0.5)
    bench.taken[DensePath(None)] = Times(0.6, 0.6)
    assert bench.choose(training=True).dense
    assert not choice._stored(Request(problem().as_dense, torch.device("cuda"), training=True)).fused


def test_inference_and_dense_layers_have_no_dense_path(bench):
    bench.choose()
    assert bench.measured == 2
    found = choice._measured(Request(problem().as_dense, torch.device("cuda"), training=True))
    assert found.plan == PLAN
    assert bench.measured == 4
    assert all("dense" not in entry for entry in stored_entries().values())


@pytest.mark.parametrize(("placed", "took"), [(False, Times(0.5, 0.5)), (None, Times(0.5, 0.5)), (True, None)])
def test_a_dense_path_that_is_wrong_or_ran_out_of_memory_is_not_taken(bench, placed, took):
    bench.taken[DensePath(PLAN)], bench.placed = took, placed
    assert bench.choose(training=True).plan == PLAN
    kept = tuned.key_of(Request(problem(), torch.device("cuda"), training=True)) in stored_entries()
    assert kept is (placed is False)


def test_kernels_of_the_dense_conv_are_compiled_ahead_unless_it_loses(bench):
    asked = {"device": torch.device("cuda"), "training": True}
    for dense, count in ((0.5, 2), (1.5, 1)):
        bench.taken[DensePath(PLAN)] = Times(dense, dense)
        tuned.entries().entries.clear()
        with mode.surveying() as noted:
            choice.choose(problem(), **asked)
        assert [len(request.problem.groups) for request in noted] == [2, 1]  # not known yet
        bench.choose(training=True)
        with mode.surveying() as noted:
            choice.choose(problem(), **asked)
        assert len(noted) == count


@pytest.mark.parametrize(
    "change",
    [
        {"tuned": 1},
        {"plan": None},
        {"plan": "tiled"},
        {"plan": "none-p1"},
        {"plan": "hopper-p1-f2-d3-w4-b5-s6-p7-r8-x9"},
        {"fused": 3},
        {"torch": {"graph": "1", "call": 1.0}},
        {"torch": {"graph": -1.0, "call": 1.0}},
        {"torch": {"graph": float("nan"), "call": 1.0}},
        {"dense": {"graph": 1.0}},
    ],
)
def test_entries_of_another_kind_are_measured_again(bench, change):
    bench.choose()
    cache = JsonCache(tuned.store_path(), key=tuned.store_path().stem, valid=bool)
    for key, entry in list(cache.entries.items()):
        cache[key] = {**entry, **change}
    cache.save()
    start_anew()
    bench.choose()
    assert bench.measured == 4


@pytest.mark.parametrize(
    "change", [{"residual": True}, {"activation": "silu"}, {"pool": "floor"}, {"stride": (2, 2)}, {"batch": 3}]
)
def test_problems_that_differ_have_keys_that_differ(change):
    one, other = (Request(each, torch.device("cuda")) for each in (problem(), replace(problem(), **change)))
    assert len({tuned.key_of(each) for each in (one, other, replace(one, training=True))}) == 3


def test_a_stored_plan_serves_training_and_inference_while_its_kernel_takes_it(bench):
    cuda, shapes = torch.device("cuda"), [(24, 16, 3, 1), (24, 16, 1, 3)]
    plain = pose((2, 16, 8, 8), shapes, torch.bfloat16, stride=(1, 1), padding=PADDING)
    pooled = replace(plain, pool="floor")
    assert tuned.measured_plan(pooled, cuda) is None
    times = {"graph": 0.5, "call": float("inf")}
    entry = {"torch": times, "fused": times, "plan": "hopper-p128-f16-d16-w4-b2-s3-p1-r2", "tuned": True}
    for each in (pooled, plain):
        tuned.keep(Request(each, cuda, training=True), entry, lasting=True)
    assert tuned.entry_of(Request(pooled, cuda, training=True)) is None, "its kernel has no such pool"
    assert tuned.entry_of(Request(plain, torch.device("cpu"), training=True)) is None
    assert [str(tuned.measured_plan(plain, cuda, tuned=only)) for only in (False, True)] == 2 * [entry["plan"]]
