"""The weights' gradient for Hopper without one: its own source, run over a small model of the hardware."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import WeightTile
from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference

CASES = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], 7, id="odd size, ragged groups"),
    pytest.param((3, 16, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 16)], 40, id="three groups"),
    pytest.param((1, 32, 11, 6), [(5, 1, 16), (1, 5, 16)], 9, id="five taps"),
    pytest.param((2, 40, 7, 5), [(1, 1, 32)], 50, id="pointwise"),
    pytest.param((1, 16, 5, 9), [(3, 3, 32)], 1, id="dense, one share"),
    pytest.param((2, 16, 7, 6), [(2, 1, 16), (1, 2, 24)], 9, id="two taps"),
    pytest.param((1, 16, 9, 6), [(4, 1, 16)], 5, id="four taps"),
]


@pytest.mark.parametrize(("size", "groups", "programs"), CASES)
def test_the_gradient_and_its_ring_of_buffers_are_right(monkeypatch, hopper_model, size, groups, programs):
    torch.manual_seed(3)
    x = torch.randn(size)
    weights = [torch.randn(f, size[1], h, w, dtype=torch.float64, requires_grad=True) for h, w, f in groups]
    options = {"stride": (1, 1), "padding": [hopper_model.same(h, w) for h, w, _ in groups]}
    problem = describe(x, weights, **options)
    y = composite_reference(x.double(), weights, None, **options)
    grad = torch.randn(y.shape)
    exact = torch.autograd.grad(y, weights, grad.double())

    kernel = hopper_model.emulate(monkeypatch, "hopper_weights")
    tile = WeightTile(pixels=32, filters=16, depth=16, stages=3)
    last = [t.permute(0, 2, 3, 1).contiguous() for t in (grad, x)]
    ours = kernel.launch_weights_hopper(problem, *last, programs, tile)
    for found, right in zip(ours, exact, strict=True):
        assert torch.linalg.norm(found - right) < 1e-5 * torch.linalg.norm(right)
    # Every second pixel of larger maps, and some of the filters of a larger gradient.
    wide = torch.randn(last[1].shape[0], 2 * size[2], 2 * size[3], size[1])
    wide[:, 1::2, ::2] = last[1]
    more = torch.cat([torch.randn(*last[0].shape[:3], 8), last[0]], -1)
    again = kernel.launch_weights_hopper(problem, more[..., 8:], wide[:, 1::2, ::2], programs, tile)
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
