"""The gradient over windows without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import WindowTile
from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    module = hopper_model.emulate(monkeypatch, "window")
    module.launch_pad_channels = hopper_model.pad_channels
    return module


WIDE = [((1, 3), (1, 3))]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("size", "groups", "padding"),
    [
        pytest.param((2, 3, 12, 34), [(3, 1, 8), (1, 3, 8)], None, id="low-rank"),
        pytest.param((1, 3, 17, 21), [(3, 3, 80)], None, id="dense, odd size, two tiles of filters"),
        pytest.param((3, 1, 4, 4), [(1, 3, 16)], None, id="one channel"),
        pytest.param((1, 3, 8, 8), [(3, 3, 16)], WIDE, id="results beyond the image"),
    ],
)
def test_weights_and_bias(emulated, hopper_model, size, groups, padding, stages):
    torch.manual_seed(4)
    x = torch.randn(size)
    weights = [torch.randn(f, size[1], h, w, requires_grad=True) for h, w, f in groups]
    options = {"stride": (1, 1), "padding": padding or [hopper_model.same(h, w) for h, w, _ in groups]}
    problem = describe(x, weights, **options, relu=True, pool="floor")
    bias = torch.randn(problem.filters, requires_grad=True)
    y = composite_reference(x, weights, bias, **options)
    height, width = problem.result_size
    quads = y[:, :, : 2 * height, : 2 * width].unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    value, place = quads.max(-1)
    codes = torch.where(value > 0, place, 4).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    grad = torch.randn(size[0], height, width, problem.filters)
    right = torch.autograd.grad(F.relu(value), [*weights, bias], grad.permute(0, 3, 1, 2))
    pixels = x.permute(0, 2, 3, 1).contiguous()
    dw, db = emulated.launch_window_gradient(problem, pixels, grad, codes, WindowTile(stages, residents=1))
    for ours, expected in zip((*dw, db), right, strict=True):
        assert ours.shape == expected.shape
    assert db.is_contiguous()  # as the operator promises
    for ours, expected in zip((*dw, db), right, strict=True):
        assert torch.linalg.norm(ours - expected) < 1e-5 * torch.linalg.norm(expected)
