"""Gradients against float64 autograd."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import backward, gather, gradients, stem, tiled
from lowrank_cnn.kernels.conv.pack import pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import ConvTensors, describe, empty_codes
from lowrank_cnn.kernels.reference import composite_reference
from tests.kernels.helpers import same

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMIT = 2e-3 if GPU else 1e-5

CASES = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 8)], None, id="odd size"),
    pytest.param((1, 16, 6, 10), [(3, 1, 8), (1, 3, 8), (3, 3, 8)], "floor", id="mixture, pool"),
    pytest.param((2, 8, 7, 5), [(3, 1, 8), (1, 3, 8)], "ceil", id="clipped windows"),
    pytest.param((1, 8, 7, 5), [(5, 1, 8), (1, 5, 12)], "floor", id="dropped row, ragged groups"),
    pytest.param((2, 16, 5, 6), [(1, 1, 24)], None, id="pointwise"),
    pytest.param((2, 8, 6, 5), [(3, 1, 6), (1, 3, 38), (3, 3, 4)], None, id="groups that begin within 16 bytes"),
]


def last(x):
    return x.detach().permute(0, 2, 3, 1).contiguous().float()


def codes(problem, before):
    """What a fused forward leaves for the backward, from the values before pool and ReLU, in float64."""
    if problem.pool is None:
        return last(before.relu())
    pad = (0, -before.shape[3] % 2, 0, -before.shape[2] % 2) if problem.pool == "ceil" else (0, 0, 0, 0)
    height, width = problem.result_size
    whole = torch.nn.functional.pad(before, pad, value=-torch.inf)[:, :, : 2 * height, : 2 * width]
    quads = whole.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    value, place = quads.max(-1)
    return torch.where(value > 0, place, backward.DEAD).permute(0, 2, 3, 1).to(torch.uint8).contiguous()


@pytest.mark.parametrize(("size", "groups", "pool"), CASES)
def test_all_gradients(size, groups, pool):
    x = torch.randn(size, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(f, size[1], h, w, device=DEVICE, dtype=torch.float64, requires_grad=True) for h, w, f in groups
    ]
    bias = torch.randn(sum(f for *_, f in groups), device=DEVICE, dtype=torch.float64, requires_grad=True)
    options = {"stride": (1, 1), "padding": [same(h, w) for h, w, _ in groups]}
    before = composite_reference(x, weights, bias, **options)
    y = composite_reference(x, weights, bias, **options, relu=True, pool=pool)
    grad = torch.randn_like(y)
    exact = torch.autograd.grad(y, [x, bias, *weights], grad)
    problem = describe(x.float(), weights, **options, relu=True, pool=pool)

    g, bias_grad = backward.launch_undo(problem, last(grad), codes(problem, before), 4)
    dx = backward.launch_input_gradient(
        problem, g, [w.detach() for w in weights], Tile(pixels=32, filters=16, depth=16)
    )
    dw = backward.launch_weight_gradient(problem, g, last(x), 8, Tile(pixels=32, filters=16, depth=16))
    for ours, right in zip([dx, bias_grad, *dw], exact, strict=True):
        assert torch.linalg.vector_norm(ours - right) <= LIMIT * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("pool", ["floor", "ceil"])
def test_the_codes_of_a_fused_pool_name_the_winners(pool):
    sizes = ((1, 8, 7, 9), (8, 8, 3, 1), (8, 8, 1, 3))
    # Numbers that TF32 holds exactly, or a kernel on a GPU could choose another winner than float64 does.
    x, *weights = ((torch.randn(size, device=DEVICE) * 64).round().div(64) for size in sizes)
    options = {"stride": (1, 1), "padding": [same(3, 1), same(1, 3)]}
    problem = describe(x, weights, **options, relu=True, pool=pool)
    right = codes(problem, composite_reference(x.double(), [w.double() for w in weights], None, **options))

    found = empty_codes(problem, x)
    tiled.launch_tiled(
        problem,
        ConvTensors(x, pack_rows(weights, x.dtype), None, codes=found),
        Tile(pixels=32, filters=16, depth=16),
    )
    assert torch.equal(found, right)
    found = empty_codes(problem, x)
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    stem.launch_stem(problem, ConvTensors(x, packed, None, codes=found), stem.StemTile(pixels=32))
    assert torch.equal(found, right)


def test_a_zero_is_cut():
    """The place of a winner in a value's lowest bits must not lift it above zero."""
    x, weights = torch.zeros(1, 8, 4, 4, device=DEVICE), [torch.randn(8, 8, 3, 3, device=DEVICE)]
    problem = describe(x, weights, stride=(1, 1), padding=[same(3, 3)], relu=True, pool="floor")
    bias, union = torch.zeros(8, device=DEVICE), pack_union(weights, problem, 128, x.dtype)
    for run in (
        lambda found: tiled.launch_tiled(
            problem, ConvTensors(x, pack_rows(weights, x.dtype), bias, codes=found), Tile(32, 16, 16)
        ),
        lambda found: stem.launch_stem(
            problem, ConvTensors(x, union, bias, codes=found), stem.StemTile(pixels=32)
        ),
    ):
        found = empty_codes(problem, x)
        assert not run(found).any()
        assert (found == 4).all()


@pytest.mark.parametrize(("pool", "stride"), [("floor", 1), ("ceil", 2), (None, 1), (None, 2)])
def test_first_layer_gradients(pool, stride):
    x = torch.randn(2, 3, 9, 11, device=DEVICE, dtype=torch.float64)
    weights = [
        torch.randn(8, 3, h, w, device=DEVICE, dtype=torch.float64, requires_grad=True)
        for h, w in ((3, 1), (1, 3))
    ]
    bias = torch.randn(16, device=DEVICE, dtype=torch.float64, requires_grad=True)
    options = {"stride": (stride, stride), "padding": [same(3, 1), same(1, 3)]}
    before = composite_reference(x, weights, bias, **options)
    y = composite_reference(x, weights, bias, **options, relu=True, pool=pool)
    grad = torch.randn_like(y)
    exact = torch.autograd.grad(y, [bias, *weights], grad)
    problem = describe(x.float(), weights, **options, relu=True, pool=pool)
    seen = codes(problem, before)
    dw, db = stem.launch_stem_gradient(problem, x.float(), last(grad), seen, 3, stem.StemTile(pixels=32))
    for ours, right in zip([db, *dw], exact, strict=True):
        assert torch.linalg.vector_norm(ours - right) <= LIMIT * torch.linalg.vector_norm(right)


@pytest.mark.parametrize(("kernel", "padding"), [((3, 3), 1), ((1, 3), 0), ((5, 1), 2), ((1, 1), 0), ((2, 3), 1)])
def test_the_gradient_of_a_single_group_is_a_convolution(monkeypatch, kernel, padding):
    x = torch.randn(2, 16, 9, 7, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, 16, *kernel, device=DEVICE, dtype=torch.float64)
    sides = ((padding, 1), (1, padding))
    y = composite_reference(x, [weight], None, stride=(1, 1), padding=[sides])
    grad = torch.randn_like(y)
    (exact,) = torch.autograd.grad(y, x, grad)
    problem = describe(x.float(), [weight], stride=(1, 1), padding=[sides], relu=True, pool=None)

    asked = []
    tile = KernelPlan("tiled", Tile(pixels=32, filters=16, depth=16))
    monkeypatch.setattr(gradients, "_hopper_plan", lambda problem, capability: asked.append(problem) or tile)
    dx = gradients.input_gradient(problem, last(grad), [weight.float()])
    assert len(asked) == 1
    assert torch.linalg.vector_norm(dx - exact) <= LIMIT * torch.linalg.vector_norm(exact)
