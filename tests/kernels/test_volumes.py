"""Layers over volumes by the kernels for images, against torch's conv3d in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import lowrank_cnn as lr
from lowrank_cnn.deploy.blocks import Epilogue, FusedBlock
from lowrank_cnn.graph.fuse import freeze, fuse
from lowrank_cnn.kernels import forced, volumes
from lowrank_cnn.kernels.fused_convs import FusedComposite
from tests.kernels.helpers import DEVICE, GPU, exact_numbers
from tests.method.test_volumes import network, settled
from tests.method.test_volumes import volumes as clips

# Tensor cores take float32 in ten bits: tests draw numbers that these hold.
ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def gradients(layer: lr.CompositeConv3d, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(y.dtype))]


@pytest.mark.parametrize(
    ("dtype", "shapes", "options"),
    [
        (torch.float32, [(3, 1, 1), (1, 3, 1), (1, 1, 3)], {"padding": ((0, 2), (1, 0), (3, 1))}),
        (torch.float32, [(1, 3, 3), (1, 1, 1)], {"stride": 2, "bias": False}),
        (torch.float16, [(2, 1, 1), (1, 3, 1)], {"stride": (1, 2, 2), "padding": 2}),
        pytest.param(
            torch.bfloat16, [(3, 1, 1), (1, 3, 3)], {"stride": (2, 1, 1)},
            marks=pytest.mark.skipif(not GPU, reason="not in Triton's interpreter"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [True, False])
def test_flat_filters_equal_torch_in_float64_with_their_gradients(
    dtype: torch.dtype, shapes: list[tuple[int, ...]], options: dict[str, Any], last: bool
):
    torch.manual_seed(0)
    layer = lr.CompositeConv3d(8, [(*shape, 8) for shape in shapes], **options).to(DEVICE).bfloat16().to(dtype)
    x = exact_numbers(2, 8, 4, 6, 5).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    upstream = exact_numbers(*layer(x).shape).to(dtype)
    with forced("on"):
        assert ": fused" in layer.explain(x)
        assert "torch" not in layer.explain(x)
        found = gradients(layer, x, upstream)
    with forced("off"):
        wanted = gradients(layer.double(), x.double(), upstream.double())
    for own, exact in zip(found, wanted, strict=True):
        assert (own.dtype, own.shape) == (dtype, exact.shape)
        assert (own - exact).norm() <= ROUNDING[dtype] * exact.norm()


def test_consecutive_groups_of_one_view_are_one_launch_over_the_volumes_own_memory():
    layer = lr.CompositeConv3d(8, [(3, 1, 1, 8), (1, 3, 1, 8), (1, 1, 3, 8)]).to(DEVICE)
    x = torch.randn(2, 8, 4, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last_3d)
    with forced("on"), mock.patch.object(volumes, "composite_conv2d", wraps=volumes.composite_conv2d) as ran:
        y = layer(x)
    along, within = (call.args[:2] for call in ran.call_args_list)
    assert (tuple(along[0].shape), tuple(within[0].shape)) == ((2, 8, 4, 30), (8, 8, 6, 5))
    assert (len(along[1]), len(within[1])) == (1, 2)
    assert along[0].data_ptr() == within[0].data_ptr() == x.data_ptr()
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


def test_other_filters_and_dilation_run_by_torch():
    x = exact_numbers(1, 8, 4, 6, 5)
    for options in ({"groups": [(3, 3, 1, 8)]}, {"groups": [(3, 1, 1, 8)], "dilation": 2}):
        layer = lr.CompositeConv3d(8, **options).to(DEVICE).bfloat16().float()
        with forced("on"):
            assert layer.explain(x).startswith("torch (")
            assert torch.allclose(layer(x), layer.double()(x.double()).float(), atol=1e-5)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("shapes", [[(3, 1, 1)], [(3, 1, 1), (1, 3, 3)]])
@pytest.mark.parametrize("add_last", [False, True])
def test_residual_and_activation_follow(shapes: list[tuple[int, ...]], activation: str | None, add_last: bool):
    x, weights = exact_numbers(2, 8, 4, 6, 5), [exact_numbers(8, 8, *own) for own in shapes]
    residual, bias = exact_numbers(2, 8 * len(shapes), 4, 6, 5), exact_numbers(8 * len(shapes))
    padding = [tuple((k // 2, k // 2) for k in own) for own in shapes]
    how: Any = {"stride": (1, 1, 1), "padding": padding, "activation": activation, "add_last": add_last}
    with forced("on"), torch.no_grad():
        found = volumes.composite_conv3d(x, weights, bias, residual=residual, **how)
    with forced("off"):
        doubles = x.double(), [weight.double() for weight in weights], bias.double()
        wanted = volumes.composite_conv3d(*doubles, residual=residual.double(), **how)
    assert torch.allclose(found.double(), wanted, atol=1e-4)


def test_a_block_adds_its_residual_in_the_same_launch():
    conv = nn.Conv3d(8, 8, (1, 3, 3), (2, 1, 1), (0, 1, 1)).to(DEVICE).bfloat16().float().requires_grad_(False)
    block = FusedBlock.of(conv, Epilogue("relu", adds=True))
    x, residual = exact_numbers(2, 8, 4, 6, 5), exact_numbers(2, 8, 1, 6, 5)
    assert block is not None
    with forced("on"), mock.patch.object(volumes, "composite_conv2d", wraps=volumes.composite_conv2d) as ran:
        found = block(x, residual)
    assert ran.call_args.kwargs["residual"] is not None
    assert torch.allclose(found, torch.relu(conv(x) + residual), atol=1e-5)


def test_it_runs_compiled_and_under_autocast():
    layer = lr.CompositeConv3d(8, [(3, 1, 1, 8), (1, 3, 1, 8), (1, 1, 3, 8)]).to(DEVICE)
    x = torch.randn(2, 8, 4, 6, 5, device=DEVICE)
    with forced("on"):
        whole = layer(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for size in (x, x[..., 1:, 1:]):  # at the second, torch traces with numbers of any value
            assert torch.allclose(compiled(size), layer(size), atol=1e-6)
        assert torch.allclose(compiled(x), whole, atol=1e-6)


@pytest.mark.parametrize("make", [fuse, freeze])
def test_an_r2plus1d_network_runs_through_them_unchanged(make):
    net, x = settled(network(flat=True)).to(DEVICE), clips().to(DEVICE)
    with forced("on"), torch.no_grad():
        fused = make(net)
        ran = [m for m in fused.modules() if isinstance(m, FusedComposite) and m.weights[0].dim() == 5]
        assert len(ran) == 9  # all but the first conv
        assert torch.allclose(fused(x), net(x), atol=1e-4)
    if make is fuse:
        assert {id(p) for p in fused.parameters()} == {id(p) for p in net.parameters()}
