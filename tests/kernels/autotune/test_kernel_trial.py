"""Plans are timed and compared with torch; failures, wrong results and lost devices are told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")


from lowrank_cnn.core.errors import LostDeviceError
from lowrank_cnn.kernels import ops as enclose
from lowrank_cnn.kernels.autotune import trial as kernel_trial
from lowrank_cnn.kernels.autotune.trial import OUT_OF_MEMORY, KernelTrial, mismatch, times
from lowrank_cnn.kernels.autotune.tuned import FAILED, DensePath, Request
from lowrank_cnn.kernels.conv import forward, gradients
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import pose
from tests.kernels.helpers import DEVICE, PADDING

PLAN = KernelPlan("tiled", Tile(pixels=32, filters=16, depth=16))
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def problem(channels=8, pool=None, relu=True):
    shapes = [(8, channels, 3, 1), (8, channels, 1, 3)]
    return pose((2, channels, 6, 5), shapes, torch.float32, stride=(1, 1), padding=PADDING, relu=relu, pool=pool)


def asked(problem, training=False):
    return Request(problem, DEVICE, training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pool", [None, "floor", "ceil"])
def test_a_plan_that_is_right_agrees(pool, training):
    assert not mismatch(asked(problem(pool=pool), training), PLAN)


def test_a_plan_that_is_wrong_does_not(monkeypatch):
    run_plan = forward.run_plan
    monkeypatch.setattr(forward, "run_plan", lambda *arguments: run_plan(*arguments) * 1.1)
    assert mismatch(asked(problem()), PLAN)


def test_codes_that_name_another_do_not(monkeypatch):
    run_plan = forward.run_plan

    def mistaken(plan, problem, x, weights, bias, codes=None, residual=None):
        y = run_plan(plan, problem, x, weights, bias, codes, residual)
        if codes is not None:
            codes[codes == 0] = 1
        return y

    monkeypatch.setattr(forward, "run_plan", mistaken)
    assert not mismatch(asked(problem(pool="floor")), PLAN)
    assert mismatch(asked(problem(pool="floor"), True), PLAN)


def test_a_wrong_gradient_does_not(monkeypatch):
    compute = gradients.compute_gradients

    def off(*arguments, **options):
        dx, dw, db = compute(*arguments, **options)
        return dx, [dw[0], dw[1].flip(0)], db

    monkeypatch.setattr(gradients, "compute_gradients", off)
    assert mismatch(asked(problem(), True), PLAN)


@pytest.mark.parametrize("pool", [None, "floor"])
@pytest.mark.parametrize("plan", [None, PLAN])
def test_a_layer_as_one_dense_conv_agrees(pool, plan):
    assert not mismatch(asked(problem(pool=pool), True), DensePath(plan))


@pytest.mark.parametrize("pool", [None, "floor"])
@pytest.mark.parametrize("name", ["place_groups", "take_groups"])
def test_weights_placed_or_taken_wrongly_do_not(monkeypatch, pool, name):
    right = getattr(enclose, name)

    def off(*arguments):
        found = right(*arguments)
        return found.flip(0) if name == "place_groups" else [part.flip(0) for part in found]

    monkeypatch.setattr(enclose, name, off)
    assert mismatch(asked(problem(pool=pool), True), DensePath(None))


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
    ("run", "took", "reason"),
    [
        (fail_with(RuntimeError("no such kernel")), FAILED, "no such kernel"),
        (fail_with(NO_ROOM), None, OUT_OF_MEMORY),
        (in_capture, None, OUT_OF_MEMORY),
    ],
)
def test_running_out_of_memory_is_no_failure_of_a_plan(monkeypatch, run, took, reason):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(kernel_trial, "captured", run)
    monkeypatch.setattr(KernelTrial, "run", run)
    assert times(asked(problem()), PLAN) == took
    assert mismatch(asked(problem()), PLAN) == reason


@pytest.mark.parametrize("ask", [times, mismatch])
def test_a_kernel_that_stops_the_device_is_named(monkeypatch, ask):
    lost = RuntimeError("CUDA error: an illegal instruction was encountered")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for place, name in ((kernel_trial, "captured"), (KernelTrial, "random"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(place, name, fail_with(lost))
    with pytest.raises(LostDeviceError, match=r"the GPU stopped while .*illegal.*LOWRANK_KERNELS=off"):
        ask(Request(problem(), torch.device("cuda")), PLAN)


@pytest.mark.parametrize("training", [False, True])
def test_the_operator_gives_what_the_kernels_give(training):
    with torch.set_grad_enabled(training):
        trial = KernelTrial.random(asked(problem(pool="floor"), training))
        for ours, right in zip(trial.call(PLAN), trial.run(PLAN), strict=True):
            assert torch.allclose(ours.float(), right.float(), atol=1e-4)


def test_a_trial_gives_gradients_in_one_order():
    trial = KernelTrial.random(asked(problem(), True))
    shapes = [[tuple(t.shape) for t in trial.run(plan)] for plan in (PLAN, None)]
    assert shapes[0] == shapes[1] == [(8, 8, 3, 1), (8, 8, 1, 3), (16,), (2, 8, 6, 5)]


def test_measuring_leaves_the_generators_alone():
    before = torch.get_rng_state()
    trial = KernelTrial.random(asked(problem(), True))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(trial.x, KernelTrial.random(asked(problem(), True)).x)
    assert not torch.equal(trial.weights[0].flatten(), trial.weights[1].flatten())
