"""What the choice rests on: times in graphs and in calls, and results that must be torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import for_graphs, gpu, mode
from lowrank_cnn.kernels.autotune import choice, measure, store
from lowrank_cnn.kernels.autotune.choice import Choice
from lowrank_cnn.kernels.autotune.measure import FAILED, Times, agrees, times
from lowrank_cnn.kernels.autotune.support import Request
from lowrank_cnn.kernels.autotune.trial import Trial
from lowrank_cnn.kernels.conv import launch
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import pose
from lowrank_cnn.system.cache import JsonCache
from lowrank_cnn.system.errors import LostDeviceError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PADDING = (((1, 1), (0, 0)), ((0, 0), (1, 1)))
PLAN = KernelPlan("tiled", Tile(pixels=32, filters=16, depth=16))
OTHER = KernelPlan("tiled", Tile(pixels=64, filters=16, depth=16))
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def problem(channels=8, pool=None, relu=True):
    shapes = [(8, channels, 3, 1), (8, channels, 1, 3)]
    return pose((2, channels, 6, 5), shapes, torch.float32, stride=(1, 1), padding=PADDING, relu=relu, pool=pool)


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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pool", [None, "floor", "ceil"])
def test_a_plan_that_is_right_agrees(pool, training):
    assert agrees(problem(pool=pool), DEVICE, PLAN, training=training)


def test_the_first_layer_agrees_without_a_gradient_of_its_images():
    from lowrank_cnn.kernels.conv.stem import StemTile

    plan = KernelPlan("stem", StemTile(pixels=32))
    assert agrees(problem(channels=3), DEVICE, plan, training=True)


def test_a_plan_that_is_wrong_does_not(monkeypatch):
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda *arguments: forward(*arguments) * 1.1)
    assert not agrees(problem(), DEVICE, PLAN, training=False)


def test_codes_that_name_another_do_not(monkeypatch):
    forward = launch.forward

    def mistaken(plan, problem, x, weights, bias, codes=None, residual=None):
        y = forward(plan, problem, x, weights, bias, codes, residual)
        if codes is not None:
            codes[codes == 0] = 1
        return y

    monkeypatch.setattr(launch, "forward", mistaken)
    assert agrees(problem(pool="floor"), DEVICE, PLAN, training=False)
    assert not agrees(problem(pool="floor"), DEVICE, PLAN, training=True)


def test_a_wrong_gradient_does_not(monkeypatch):
    gradients = launch.gradients

    def off(*arguments, **options):
        dx, dw, db = gradients(*arguments, **options)
        return dx, [dw[0], dw[1].flip(0)], db

    monkeypatch.setattr(launch, "gradients", off)
    assert not agrees(problem(), DEVICE, PLAN, training=True)


def test_a_plan_that_fails_does_not():
    assert not agrees(replace(problem(), stride=(2, 2)), DEVICE, PLAN, training=False)
    assert measure.FAILED.graph == float("inf")


def fail_with(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def in_capture(*_: object) -> None:
    """Memory runs out while a graph is captured, whose end then fails as well."""
    try:
        raise NO_ROOM
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("run", "took", "right"),
    [
        (fail_with(RuntimeError("no such kernel")), FAILED, False),
        (fail_with(NO_ROOM), None, None),
        (in_capture, None, None),
    ],
)
def test_running_out_of_memory_is_no_failure_of_a_plan(monkeypatch, run, took, right):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(measure, "captured", run)
    monkeypatch.setattr(Trial, "run", run)
    assert times(problem(), DEVICE, PLAN, training=False) == took
    assert agrees(problem(), DEVICE, PLAN, training=False) is right


@pytest.mark.parametrize("ask", [times, agrees])
def test_a_kernel_that_stops_the_device_is_named(monkeypatch, ask):
    lost = RuntimeError("CUDA error: an illegal instruction was encountered")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for place, name in ((measure, "captured"), (Trial, "random"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(place, name, fail_with(lost))
    with pytest.raises(LostDeviceError, match=r"the GPU stopped while .*illegal.*LOWRANK_KERNELS=off"):
        ask(problem(), torch.device("cuda"), PLAN, training=False)


class Bench:
    """Stands for a GPU: what each path takes on it (None is torch's own), and whether its results are right."""

    def __init__(self) -> None:
        self.taken: dict[KernelPlan | None, Times | None] = {None: Times(2.0, 2.0), PLAN: Times(1.0, 1.0)}
        self.right: dict[KernelPlan, bool | None] = {PLAN: True}
        self.measured = 0

    def times(self, problem: object, device: object, plan: KernelPlan | None, **_: object) -> Times | None:
        self.measured += 1
        return self.taken[plan]

    def agrees(self, problem: object, device: object, plan: KernelPlan, **_: object) -> bool | None:
        return self.right[plan]

    def choose(self) -> Choice:
        asked = Request(problem(), torch.device("cuda"))
        found = choice._stored(asked) or choice._measured(asked)
        assert found is not None
        return found

    def tune(self) -> Choice | None:
        with mode.tuning():
            return choice._measured(Request(problem(), torch.device("cuda")))


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setenv("LOWRANK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choice, "plans_of", lambda *_: tuple(made.right))
    monkeypatch.setattr(choice, "times", made.times)
    monkeypatch.setattr(choice, "agrees", made.agrees)
    start_anew()
    yield made
    start_anew()


def stored_entries() -> dict:
    """What the file holds, as a new process reads it."""
    path = store.store_path()
    return JsonCache(path, key=path.stem, valid=bool).entries


def start_anew() -> None:
    """As a new process does."""
    store.entries.cache_clear()
    store._passing.clear()


def test_what_was_measured_holds_in_later_runs(bench):
    for _ in range(2):
        assert bench.choose().fused
        start_anew()
    assert bench.measured == 2


def test_a_plan_that_fails_is_remembered(bench):
    bench.taken[PLAN] = FAILED
    for _ in range(2):
        assert not bench.choose().fused
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
    assert bench.measured == 2
    assert not store.store_path().exists()
    start_anew()
    bench.taken, bench.right = taken, right
    assert bench.choose().fused
    assert "Infinity" not in store.store_path().read_text()


@pytest.mark.parametrize(("by_torch", "searched"), [(2.5, [False]), (1.5, [False, True])])
def test_cudnn_searches_only_where_that_may_decide(bench, monkeypatch, by_torch, searched):
    """And not under the settings by which torch keeps what was found without a search."""
    cudnn, seen = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "benchmark", True)
    bench.taken[None] = Times(by_torch, by_torch)

    def times(problem: object, device: object, plan: KernelPlan | None, **how: object) -> Times | None:
        seen.extend([] if plan else [(cudnn.benchmark, cudnn.allow_tf32)])
        return bench.times(problem, device, plan, **how)

    monkeypatch.setattr(choice, "times", times)
    before = cudnn.allow_tf32
    assert choice._measured(Request(replace(problem(), dtype=torch.bfloat16), torch.device("cuda"))).fused
    assert seen == [(search, before is search) for search in searched]
    assert (cudnn.benchmark, cudnn.allow_tf32) == (True, before)


def test_where_nothing_can_be_measured_nothing_is_stored(bench):
    bench.taken = {None: None, PLAN: FAILED}
    assert choice._measured(Request(problem(), torch.device("cuda"))) is None
    assert not store.entries().entries
    assert not store._passing


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


def test_only_hopper_has_its_own_gradient_of_the_weights(monkeypatch):
    from lowrank_cnn.kernels.conv import backward, hopper_weights

    taken = []
    monkeypatch.setattr(hopper_weights, "launch_weights_hopper", lambda *_: taken.append("hopper"))
    monkeypatch.setattr(backward, "launch_weight_gradient", lambda *rest: taken.append(rest[-1].stages))
    wide = pose((2, 16, 6, 5), [(16, 16, 3, 1), (16, 16, 1, 3)], torch.bfloat16, stride=(1, 1), padding=PADDING)
    for capability, posed in [((9, 0), wide), ((9, 0), problem()), ((10, 0), wide), ((8, 0), wide)]:
        monkeypatch.setattr(gpu, "capability_of", lambda _, capability=capability: capability)
        launch.weight_gradient(posed, torch.zeros(1), torch.zeros(1))
    assert taken == ["hopper", 1, 1, 3]


def test_only_hopper_has_the_gradient_over_windows(monkeypatch):
    from lowrank_cnn.kernels.conv import stem, window_gradient

    taken = []
    found = ([], torch.zeros(1))
    monkeypatch.setattr(window_gradient, "launch_window_gradient", lambda *_: taken.append("window") or found)
    monkeypatch.setattr(stem, "launch_stem_gradient", lambda *_: taken.append("stem") or found)
    for capability, channels in [((9, 0), 3), ((9, 0), 4), ((8, 0), 3)]:
        monkeypatch.setattr(gpu, "capability_of", lambda _, capability=capability: capability)
        first = pose(
            (1, channels, 4, 4), [(16, channels, 3, 3)], torch.bfloat16,
            stride=(1, 1), padding=[((1, 1), (1, 1))], relu=True, pool="floor",
        )  # fmt: skip
        x, grad = torch.zeros(1, channels, 4, 4), torch.zeros(1, 16, 2, 2)
        launch.gradients(first, grad, x, [], torch.zeros(1, 2, 2, 16), need_input=False)
    assert taken == ["window", "stem", "stem"]


def test_a_tuned_plan_is_not_looked_for_again(bench):
    bench.taken[OTHER], bench.right[OTHER] = Times(0.5, 0.5), True
    bench.tune()
    before = bench.measured
    with mode.tuning():
        found = choice._measured(Request(problem(), torch.device("cuda"), training=True))
    assert found is not None
    assert found.plan == OTHER
    assert bench.measured == before + 2  # itself and torch, in training


def test_processes_keep_what_others_stored(bench):
    bench.choose()
    [entry] = stored_entries().values()
    other = JsonCache(store.store_path(), key=store.store_path().stem, valid=bool)
    other["another"] = entry
    other.save()
    store.keep("third", entry, lasting=True)
    assert {"another", "third"} <= stored_entries().keys()


@pytest.mark.parametrize(
    "change",
    [
        {"tuned": 1},
        {"plan": None},
        {"plan": "tiled"},
        {"plan": "none-p1"},
        {"fused": 3},
        {"torch": {"graph": "1", "call": 1.0}},
    ],
)
def test_entries_of_another_kind_are_measured_again(bench, change):
    bench.choose()
    cache = JsonCache(store.store_path(), key=store.store_path().stem, valid=bool)
    for key, entry in list(cache.entries.items()):
        cache[key] = {**entry, **change}
    cache.save()
    start_anew()
    bench.choose()
    assert bench.measured == 4


def test_a_trial_gives_gradients_in_one_order():
    trial = Trial.random(problem(), DEVICE, True)
    shapes = [[tuple(t.shape) for t in trial.run(plan)] for plan in (PLAN, None)]
    assert shapes[0] == shapes[1] == [(8, 8, 3, 1), (8, 8, 1, 3), (16,), (2, 8, 6, 5)]


def test_measuring_leaves_the_generators_alone():
    before = torch.get_rng_state()
    trial = Trial.random(problem(), DEVICE, True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(trial.x, Trial.random(problem(), DEVICE, True).x)
    assert not torch.equal(trial.weights[0].flatten(), trial.weights[1].flatten())
