"""Plans run with their whole epilogue: bias, residual, activation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.conv import forward, gather, stem, tiled
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan, plans

ACTIVATIONS = ["relu", "leaky_relu", "leaky_relu:0.2", "silu", "gelu", "hardswish", None]


@pytest.mark.parametrize(
    ("activation", "residual", "add_last"),
    [
        *((name, added, False) for name in ACTIVATIONS for added in (False, True)),
        ("relu", True, True),
        ("silu", True, True),
    ],
)
@pytest.mark.parametrize("kernel", ["tiled", "stem", "gather"])
def test_epilogues(layers, monkeypatch, kernel, activation, residual, add_last):
    """Bias, residual and activation of every plain kernel, with filters that fill no whole tile."""
    module = {"tiled": tiled, "stem": stem, "gather": gather}[kernel]
    layers.poison(monkeypatch, module)
    size = (2, 8 if kernel == "tiled" else 3, 5, 7)
    how = {"activation": activation, "residual": residual, "add_last": add_last}
    x, weights, bias, problem, exact, added = layers.posed(size, [(3, 1, 8), (1, 3, 16)], **how)
    plan = {
        "tiled": KernelPlan("tiled", tiled.Tile(pixels=32, filters=16, depth=16)),
        "stem": KernelPlan("stem", stem.StemTile(pixels=32)),
        "gather": KernelPlan("gather", gather.GatherTile(pixels=32, filters=16, depth=16)),
    }[kernel]
    y = forward.run_plan(plan, problem, x, weights, bias, residual=added)
    layers.assert_agrees(y, exact, x.dtype)


def test_a_residual_of_another_size_is_refused(layers):
    x, weights, bias, problem, _, added = layers.posed((1, 8, 6, 6), [(3, 3, 8)], residual=True)
    with pytest.raises(LowRankError, match="the residual is 1x8x6x5; it must be 1x8x6x6"):
        forward.run_plan(KernelPlan("tiled", tiled.Tile()), problem, x, weights, bias, residual=added[..., :5])


@pytest.mark.parametrize("size", [(1, 3, 8, 8), (1, 16, 8, 8), (1, 20, 7, 7)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_packed_weights_have_the_shape_that_tracing_expects(layers, size, stride):
    x, weights, _, problem, *_ = layers.posed(size, [(3, 1, 16), (1, 3, 16)], stride=stride, dtype=torch.float16)
    for plan in plans(problem, capability=(9, 0)):
        layout = KERNELS[plan.kernel].layout
        packed = forward.pack_weights(layout, problem, weights, x.dtype)
        assert tuple(packed.shape) == forward.packed_shape(layout, problem), plan
