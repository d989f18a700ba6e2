"""The table of fastest plans is for what it was measured on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.plans import KernelPlan, plans, preset, shape_of
from lowrank_cnn.kernels.problem import pose

SIDES = [((1, 1), (0, 0)), ((0, 0), (1, 1))]
SHAPES = [(128, 256, 3, 1), (128, 256, 1, 3)]


def problem(batch=256, dtype=torch.bfloat16, size=56):
    options = {"stride": (1, 1), "padding": SIDES, "relu": True, "pool": "floor"}
    return pose((batch, 256, size, size), SHAPES, dtype, **options)


def test_a_known_plan_comes_first():
    best = preset(problem(), (9, 0))
    assert best is not None
    assert plans(problem(), capability=(9, 0))[0] == KernelPlan.parse(best)


@pytest.mark.parametrize("other", [{"batch": 1}, {"dtype": torch.float32}, {"size": 55}])
def test_another_problem_is_not_known(other):
    assert preset(problem(**other), (9, 0)) is None
    assert preset(problem(), (8, 0)) is None


def test_a_plan_whose_kernel_refuses_is_left_out(monkeypatch):
    first = pose((32, 3, 8, 8), [(16, 3, 3, 3)], torch.bfloat16, stride=(1, 1), padding=[((1, 1), (1, 1))])
    stored = {"9.0": {shape_of(first): {"forward": "window-s3-r3"}}}
    monkeypatch.setattr("lowrank_cnn.kernels.conv.plans.table", lambda: stored)
    assert {plan.kernel for plan in plans(first, capability=(9, 0))} == {"stem"}
