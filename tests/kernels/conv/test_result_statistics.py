"""Mean and variance out of the convs' epilogues, against float64 and against the result itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import composite_conv2d_with_statistics, composite_reference, forced
from lowrank_cnn.kernels.conv import forward, gather, stem, tiled
from lowrank_cnn.kernels.conv import forward as result_statistics
from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, part_count
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.problem import ConvTensors, describe
from tests.kernels.helpers import assert_well_formed, same

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMIT = 2e-3 if GPU else 1e-5


def posed(size, groups, stride=(1, 1)):
    x = torch.randn(size, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(f, size[1], h, w, device=DEVICE) / (h * w) for h, w, f in groups]
    options = {"stride": stride, "padding": [same(h, w) for h, w, _ in groups]}
    return x, weights, torch.randn(sum(f for *_, f in groups), device=DEVICE), options


def close(ours, right):
    return torch.linalg.vector_norm(ours - right) <= LIMIT * torch.linalg.vector_norm(right)


def moments(y):
    return torch.var_mean(y.double(), (0, 2, 3), correction=0)[::-1]


PLANS = [
    pytest.param(KernelPlan("tiled", tiled.Tile(32, 16, 16)), (2, 8, 9, 7), (1, 1), id="tiled, odd size"),
    pytest.param(KernelPlan("tiled", tiled.Tile(32, 16, 16)), (3, 16, 8, 6), (2, 2), id="tiled, stride 2"),
    pytest.param(KernelPlan("stem", stem.StemTile(32)), (2, 3, 9, 7), (1, 1), id="stem"),
    pytest.param(KernelPlan("gather", gather.GatherTile(32, 16, 16)), (2, 3, 9, 7), (2, 2), id="gather"),
]


@pytest.mark.parametrize(("plan", "size", "stride"), PLANS)
def test_of_every_plain_kernel(plan, size, stride):
    x, weights, bias, options = posed(size, [(3, 1, 8), (1, 3, 24)], stride)
    found = forward.run_with_statistics(plan, describe(x, weights, **options), x, weights, bias)
    right = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert all(close(ours, exact) for ours, exact in zip(found, (right, *moments(right)), strict=True))


HOPPER = [
    pytest.param((2, 16, 9, 7), [(3, 1, 16), (1, 3, 24)], (1, 1), 1, id="two ways to run"),
    pytest.param((3, 16, 6, 10), [(3, 3, 32)], (2, 2), 2, id="stride 2"),
    pytest.param((1, 16, 5, 5), [(1, 1, 16)], (1, 1), 1, id="pointwise"),
]


@pytest.mark.skipif(GPU, reason="the model of the hardware runs on the host")
@pytest.mark.parametrize(("size", "groups", "stride", "parts"), HOPPER)
def test_of_the_hopper_kernel(monkeypatch, hopper_model, size, groups, stride, parts):
    emulated = hopper_model.emulate(monkeypatch)
    x, weights, bias, options = posed(size, groups, stride)
    problem = describe(x, weights, **options)
    tile = HopperTile(pixels=64, filters=16, depth=16, boxes=2, slabs=2, parts=parts)
    made = torch.full((3, part_count(problem, tile), problem.filters), torch.nan)
    packed = pack_rows(weights, x.dtype)
    y = emulated.launch_hopper(problem, ConvTensors(x, packed, bias, parts=made), tile)
    assert made[0].sum(0).eq(y.numel() // y.shape[1]).all()
    assert all(
        close(ours, right) for ours, right in zip(result_statistics.launch_merge(made), moments(y), strict=True)
    )


def test_a_large_mean_leaves_the_variance_its_digits():
    y = (1000 + torch.randn(4, 40, 30, 30, device=DEVICE)).contiguous(memory_format=torch.channels_last)
    found = result_statistics.launch_merge(result_statistics.launch_parts(y))
    assert all(
        torch.linalg.vector_norm(ours - right) <= 1e-5 * torch.linalg.vector_norm(right)
        for ours, right in zip(found, moments(y), strict=True)
    )


def test_many_parts_are_merged_in_turns():
    """More than one program merges at once: each leaves a part."""
    parts = torch.rand(3, result_statistics.MERGED + 7, 5, device=DEVICE)
    parts[0] = parts[0].mul(9).round()
    n, mean, squares = parts.double()
    total = n.sum(0)
    middle = (n * mean).sum(0) / total
    spread = (squares + n * (mean - middle) ** 2).sum(0)
    found = result_statistics.launch_merge(parts)
    assert torch.allclose(found[0].double(), middle, rtol=1e-5)
    assert torch.allclose(found[1].double(), spread / total, rtol=1e-5)


@pytest.mark.parametrize("how", ["on", "off"])
def test_a_batch_norm_behind_it_trains(how):
    """Its backward accounts for the statistics, which have no gradient of their own."""
    x, weights, bias, options = posed((2, 16, 6, 5), [(3, 1, 8), (1, 3, 8)])
    leaves = [x, *weights, bias]
    for leaf in leaves:
        leaf.requires_grad_()
    with forced(how):
        y, mean, variance = composite_conv2d_with_statistics(x, weights, bias, **options)
    assert not mean.requires_grad
    assert not variance.requires_grad
    right = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    grad = torch.randn_like(right)
    exact = torch.autograd.grad(right, leaves, grad)
    ours = torch.autograd.grad(y, leaves, grad.float())
    assert all(
        close(a, b) for a, b in zip([y, mean, variance, *ours], [right, *moments(right), *exact], strict=True)
    )


def test_torch_compile_takes_it_whole():
    torch._dynamo.reset()
    x, weights, _, options = posed((2, 16, 6, 5), [(3, 1, 8), (1, 3, 8)])
    weights = [weight.requires_grad_() for weight in weights]

    def normed(x):
        y, mean, variance = composite_conv2d_with_statistics(x, weights, **options)
        return (y - mean.view(-1, 1, 1)) * (variance + 1e-5).rsqrt().view(-1, 1, 1)

    with forced("on"):
        ours = torch.compile(normed, backend="aot_eager", fullgraph=True)(x)
        right = normed(x)
        grads = [torch.autograd.grad(y.square().sum(), weights) for y in (ours, right)]
    assert close(ours, right)
    assert all(close(a, b) for a, b in zip(*grads, strict=True))


def test_the_operator_is_well_formed():
    from lowrank_cnn.kernels import ops

    x, weights, bias, options = posed((1, 16, 6, 6), [(3, 1, 8), (1, 3, 8)])
    leaves = [x.requires_grad_(), [w.requires_grad_() for w in weights], bias.requires_grad_()]
    arguments = (*leaves, [1, 1], ops.flat_padding(options["padding"]), "tiled-p32-f16-d16-w4-s3")
    assert_well_formed(ops.composite_conv2d_statistics, arguments, gradients=True)
