"""The definition that kernels are compared with, and torch's fastest way to compute it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.kernels.reference import (
    composite_by_torch,
    composite_reference,
    conv_on_sides,
    interleaved,
    pad_on_sides,
)
from lowrank_cnn.method.layers import CompositeConv2d

SIDES = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


@pytest.mark.parametrize("compute", [composite_reference, composite_by_torch])
def test_groups_bias_residual_activation_and_pool(compute):
    x, residual, bias = torch.randn(2, 3, 6, 6), torch.randn(2, 5, 6, 6), torch.randn(5)
    weights = [torch.randn(2, 3, 3, 1), torch.randn(3, 3, 1, 3)]
    options = {"stride": (1, 1), "padding": SIDES, "activation": "silu", "pool": "floor", "residual": residual}
    first = F.conv2d(x, weights[0], bias[:2], padding=(1, 0))
    second = F.conv2d(x, weights[1], bias[2:], padding=(0, 1))
    right = F.max_pool2d(F.silu(torch.cat([first, second], 1) + residual), 2)
    assert torch.allclose(compute(x, weights, bias, **options), right, atol=1e-6)


def test_by_torch_computes_in_the_type_of_the_input():
    x, weight, bias = torch.randn(1, 4, 3, 3).bfloat16(), torch.randn(4, 4, 1, 1).bfloat16(), torch.randn(4)
    assert composite_by_torch(x, [weight], bias, stride=(1, 1), padding=[((0, 0), (0, 0))]).dtype == torch.bfloat16


@pytest.mark.parametrize("sides", [((1, 1), (2, 2)), ((2, 0), (0, 1)), ((-1, 1), (0, -2))])
def test_a_conv_with_any_padding(sides):
    x, weight = torch.randn(1, 2, 7, 8), torch.randn(3, 2, 3, 3)
    (top, bottom), (left, right) = sides
    padded = F.pad(x, (left, right, top, bottom))
    assert torch.allclose(conv_on_sides(x, weight, None, sides, (1, 1)), F.conv2d(padded, weight), atol=1e-5)


def test_other_padding_crops_first():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    found = pad_on_sides(x, ((-1, 0), (1, 1)), "replicate")
    assert torch.equal(found, F.pad(x[:, :, 1:], (1, 1, 0, 0), mode="replicate"))


def test_filters_of_a_channel_group_stay_together():
    parts = [torch.tensor([[1, 1, 2, 2]]), torch.tensor([[10, 20]])]
    assert interleaved(parts, 2, 1).tolist() == [[1, 1, 10, 2, 2, 20]]
    assert interleaved(parts, 1, 1).tolist() == [[1, 1, 2, 2, 10, 20]]


CROPPED = [((0, 0), (-1, -1)), ((-1, 2), (0, -2)), ((-2, -1), (1, 0)), ((0, -1), (3, 0)), ((1, 2), (0, 1))]


@pytest.mark.parametrize("sides", CROPPED)
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_sides_are_cropped_and_padded(sides: tuple[tuple[int, int], tuple[int, int]], mode: str):
    x = torch.randn(2, 3, 9, 8)
    (top, bottom), (left, right) = sides
    cropped = F.pad(x, [min(left, 0), min(right, 0), min(top, 0), min(bottom, 0)])
    expected = F.pad(cropped, [max(left, 0), max(right, 0), max(top, 0), max(bottom, 0)], mode=mode)
    assert torch.equal(pad_on_sides(x, sides, mode), expected)


def test_engines_see_no_negative_pads_where_a_conv_without_padding_is_split():
    """ncnn and ExecuTorch have none."""
    net = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)], padding=0))
    exported = torch.export.export(net, (torch.randn(2, 3, 8, 8),))
    assert not any("pad" in str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(exported.module()(torch.ones(2, 3, 8, 8)), net(torch.ones(2, 3, 8, 8)))
