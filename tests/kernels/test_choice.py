"""What the choice rests on: times in graphs and in calls, and results that must be torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import choice, for_graphs, launch, measure
from lowrank_cnn.kernels.launch import Plan
from lowrank_cnn.kernels.measure import Trial, agrees
from lowrank_cnn.kernels.problem import pose
from lowrank_cnn.kernels.tiled import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PADDING = (((1, 1), (0, 0)), ((0, 0), (1, 1)))
PLAN = Plan("tiled", Tile(pixels=32, filters=16, depth=16))


def problem(channels=8, pool=None, relu=True):
    shapes = [(8, channels, 3, 1), (8, channels, 1, 3)]
    return pose((2, channels, 6, 5), shapes, torch.float32, stride=(1, 1), padding=PADDING, relu=relu, pool=pool)


def test_graphs_and_calls_choose_by_their_own_times():
    entry = {
        "torch": {"graph": 0.2, "call": 0.3},
        "fused": {"graph": 0.1, "call": 0.9},
        "plan": PLAN.to_dict(),
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
@pytest.mark.parametrize("pool", [None, "floor"])
def test_a_plan_that_is_right_agrees(pool, training):
    assert agrees(problem(pool=pool), DEVICE, PLAN, training=training)


def test_the_first_layer_agrees_without_a_gradient_of_its_images():
    from lowrank_cnn.kernels.stem import StemTile

    plan = Plan("stem", StemTile(pixels=32))
    assert agrees(problem(channels=3), DEVICE, plan, training=True)


def test_a_plan_that_is_wrong_does_not(monkeypatch):
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda *arguments: forward(*arguments) * 1.1)
    assert not agrees(problem(), DEVICE, PLAN, training=False)


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
