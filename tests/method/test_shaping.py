"""Masked layers compute with the taps inside their shapes alone, and every tap learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.method.shaped_layers import ShapedConv2d

LEARNED = parse_scheme("learned(kx1, 1xk, kxk, 5x1, 1x5)")


def shaped(conv: nn.Conv2d) -> ShapedConv2d:
    layer = LEARNED.build(conv)
    assert isinstance(layer, ShapedConv2d)
    layer.copy_dense(conv.weight, conv.bias)
    return layer.double()


@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 2, "dilation": 2}, {"padding": "same"},
     {"padding": 1, "padding_mode": "reflect"}, {"padding": 0}],
)  # fmt: skip
def test_it_begins_as_the_dense_conv(options):
    conv, x = nn.Conv2d(3, 6, 3, **options).double(), torch.randn(2, 3, 9, 9).double()
    torch.testing.assert_close(shaped(conv)(x), conv(x))


def test_a_shape_leaves_only_its_taps():
    layer = shaped(nn.Conv2d(2, 4, 3, padding=1))
    layer.choice.copy_(torch.tensor([0, 1, 2, 3]))
    weight = layer.shaped_weight()
    used = (weight != 0).any(1).sum((1, 2))
    assert used.tolist() == [3, 3, 9, 3]  # the ends of 5x1 start at zero
    assert torch.equal(weight[0, :, 1:4, 2], layer.weight[0, :, 1:4, 2])
    (gradient,) = torch.autograd.grad(weight.sum(), layer.weight)
    assert torch.equal(gradient, layer.masks[layer.choice][:, None].expand_as(gradient))


def test_taps_outside_the_shapes_shrink_and_all_are_used_again():
    layer = shaped(nn.Conv2d(2, 4, 3, padding=1))
    before = layer.weight.detach().clone()
    layer.choice.copy_(torch.tensor([0, 0, 1, 1]))
    mask = layer.masks[layer.choice][:, None].expand_as(before).bool()
    layer.shrink_outside(0.25)
    assert torch.equal(layer.weight[mask], before[mask])
    assert torch.equal(layer.weight[~mask], 0.75 * before[~mask])
    assert {layer.starts[i] for i in layer.choice.tolist()} == {(5, 5)}


def test_filters_begin_with_the_taps_of_all_shapes_and_all_of_them_learn():
    layer = shaped(nn.Conv2d(2, 4, 3, padding=1))
    (gradient,) = torch.autograd.grad(layer(torch.randn(2, 2, 9, 9).double()).square().sum(), layer.weight)
    learning = (gradient != 0).all(1).all(0)
    assert learning.int().tolist() == [
        [0, 0, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 0, 0],
    ]


def test_exact_layers_have_the_filters_that_are_counted():
    conv = parse_scheme("exact(3x1=4, 1x3=8)").build(nn.Conv2d(8, 12, 3, padding=1))
    assert conv(torch.randn(1, 8, 5, 5)).shape == (1, 12, 5, 5)
    with pytest.raises(LowRankError, match="not a plain conv"):
        parse_scheme("exact(3x1=4)").build(nn.ReLU())
    with pytest.raises(LowRankError, match="not a plain conv"):
        LEARNED.build(nn.ReLU())
    with pytest.raises(LowRankError, match="without channel groups"):
        LEARNED.build(nn.Conv2d(4, 4, 3, groups=2))
