"""The operators: results, gradients, what tracing is told of them, and their count of operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from lowrank_cnn.kernels import composite_conv2d, composite_reference, forced
from tests.kernels.helpers import DEVICE, GPU, PADDING, assert_well_formed, inputs


@pytest.mark.parametrize(("channels", "pool"), [(8, None), (8, "floor"), (24, "ceil"), (3, "floor")])
def test_the_operator_and_its_gradients(channels, pool):
    x, weights, bias = inputs((1, channels, 7, 6))
    leaves = [*weights, bias] + ([x] if channels > 3 else [])
    for leaf in leaves:
        leaf.requires_grad_()
    options = {"padding": PADDING, "relu": True, "pool": pool}
    with forced("on"):
        y = composite_conv2d(x, weights, bias, **options)
    right = composite_reference(x.double(), [w.double() for w in weights], bias.double(), stride=(1, 1), **options)
    grad = torch.randn_like(y)
    ours = [y, *torch.autograd.grad(y, leaves, grad)]
    exact = [right, *torch.autograd.grad(right, leaves, grad.double())]
    for a, b in zip(ours, exact, strict=True):
        assert torch.linalg.vector_norm(a - b) <= (3e-3 if GPU else 1e-5) * torch.linalg.vector_norm(b)


def test_operators_are_well_formed():
    from lowrank_cnn.kernels import ops

    x, weights, bias = inputs((1, 8, 6, 6))
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights), bias.requires_grad_()]
    plan = "tiled-p32-f16-d16-w4-s3"
    arguments = (
        leaves[0], leaves[1:3], leaves[3], None, [1, 1], ops.flat_padding(PADDING), "relu", "floor", True, plan,
        False,
    )  # fmt: skip
    assert_well_formed(ops.composite_conv2d, arguments, gradients=True)


def test_operations_are_counted():
    x, weights, bias = inputs((1, 8, 6, 6))
    with forced("on"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        composite_conv2d(x, weights, bias, padding=PADDING, relu=True, pool="floor")
    assert counter.get_total_flops() == 2 * 36 * 8 * 3 * 16


@pytest.mark.parametrize(
    ("channels", "kernels"), [(3, [(3, 1), (1, 3)]), (16, [(3, 1), (1, 3)]), (16, [(1, 1), (1, 1)])]
)
def test_gradients_are_as_tracing_expects_them(channels, kernels):
    """Strides as well as shapes; and no two share memory."""
    from lowrank_cnn.kernels.ops import composite_conv2d_backward

    x = torch.randn(2, channels, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(8, channels, *kernel, device=DEVICE) for kernel in kernels]
    padding = [side for h, w in kernels for side in (h // 2, h // 2, w // 2, w // 2)]
    y = torch.rand(2, 16, 6, 5, device=DEVICE)
    arguments = (y, x, weights, y.permute(0, 2, 3, 1), [1, 1], padding, True, "", channels > 4, True)
    assert_well_formed(composite_conv2d_backward, arguments, gradients=False)
    found = composite_conv2d_backward(*arguments)
    assert len({part.untyped_storage().data_ptr() for part in found if part.numel()}) == sum(
        part.numel() > 0 for part in found
    )
