"""A problem: its sizes, counts and activations, and the reference that defines what kernels compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.problem import describe, pose
from lowrank_cnn.kernels.reference import (
    compose,
    composite_by_torch,
    composite_reference,
    conv_on_sides,
    enclosed,
    is_product,
    pad_on_sides,
    pointwise,
)
from lowrank_cnn.method.layers import CompositeConv2d

SHAPES, SIDES = [(4, 3, 3, 1), (6, 3, 1, 3)], [((1, 1), (0, 0)), ((0, 0), (1, 1))]


def problem(size=(2, 3, 7, 6), **options):
    return pose(size, SHAPES, torch.float16, **{"stride": (1, 1), "padding": SIDES, **options})


@pytest.mark.parametrize("pool", [None, "floor", "ceil", "3x3/2"])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_sizes_are_those_of_the_reference(pool, stride):
    x, weights = torch.zeros(2, 3, 7, 6), [torch.zeros(shape) for shape in SHAPES]
    options = {"stride": stride, "padding": SIDES, "pool": pool}
    posed, right = describe(x, weights, **options), composite_reference(x, weights, None, **options)
    assert (posed.batch, posed.filters, *posed.result_size) == tuple(right.shape)
    assert posed.padding[0][0] == (1, posed.padding[0][0][1])


@pytest.mark.parametrize(
    ("groups", "padding"),
    [
        ([(3, 1), (1, 3), (1, 1)], [((1, 1), (0, 0)), ((0, 0), (1, 1)), ((0, 0), (0, 0))]),
        ([(2, 2), (3, 1)], [((1, 0), (0, 1)), ((0, 2), (0, 0))]),
        ([(3, 3), (1, 1)], [((2, 2), (0, 1)), ((1, 1), (-1, 0))]),
    ],
)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_as_dense_it_is_what_the_enclosing_weight_poses(groups, padding, stride):
    x, weights = torch.zeros(1, 3, 8, 8), [torch.zeros(4, 3, *taps) for taps in groups]
    posed = describe(x, weights, stride=stride, padding=padding, relu=True)
    weight, sides = enclosed(weights, padding)
    assert describe(x, [weight], stride=stride, padding=[sides], relu=True) == posed.as_dense


def test_counts_and_text():
    assert problem().macs == 2 * 42 * 3 * (3 * 4 + 3 * 6)
    assert problem().bytes == 2 * (2 * 42 * 3 + 2 * 42 * 10 + 3 * 30)
    assert str(problem(relu=True, pool="floor")) == "2x3x7x6 3x1,4+1x3,6 /1x1,relu,pool-floor float16"
    assert problem(relu=True, pool="floor").can_pool_first
    assert not problem(activation="gelu", pool="floor").can_pool_first
    assert not replace(problem(pool="floor"), residual=True).can_pool_first


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pool": "mean"}, "pool is None"),
        ({"padding": SIDES[:1]}, "2 filter groups need as many paddings"),
        ({"padding": [SIDES[0], SIDES[0]]}, r"one output size, not \d+x\d+ and \d+x\d+\."),
        ({"relu": True, "activation": "gelu"}, "contradict"),
        *(({"activation": name}, "the activation is one of")
          for name in ("tanh", "relu:1", "leaky_relu:", "leaky_relu:nan", "leaky_relu:steep")),
    ],
)  # fmt: skip
def test_what_cannot_be_posed(options, why):
    with pytest.raises(LowRankError, match=why):
        problem(**options)


@pytest.mark.parametrize("compute", [composite_reference, composite_by_torch])
def test_groups_bias_residual_activation_and_pool(compute):
    x, residual, bias = torch.randn(2, 3, 6, 6), torch.randn(2, 5, 6, 6), torch.randn(5)
    weights = [torch.randn(2, 3, 3, 1), torch.randn(3, 3, 1, 3)]
    options = {"stride": (1, 1), "padding": SIDES, "activation": "silu", "pool": "floor", "residual": residual}
    first = F.conv2d(x, weights[0], bias[:2], padding=(1, 0))
    second = F.conv2d(x, weights[1], bias[2:], padding=(0, 1))
    right = F.max_pool2d(F.silu(torch.cat([first, second], 1) + residual), 2)
    assert torch.allclose(compute(x, weights, bias, **options), right, atol=1e-6)
    half = [t.bfloat16() for t in (x, *weights)]  # the input decides the type
    options = {"stride": (1, 1), "padding": SIDES}
    assert composite_by_torch(half[0], half[1:], bias, **options).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(3, 6, 5), (2, 3, 6, 5)], ids=str)
def test_a_pointwise_conv_trains_as_a_product_of_matrices(size):
    layout = torch.channels_last if len(size) == 3 else torch.channels_last_3d
    x = torch.randn(2, 8, *size[1:], dtype=torch.double).contiguous(memory_format=layout).requires_grad_()
    weight, bias = torch.randn(5, 8, *[1] * (len(size) - 1)).double().requires_grad_(), torch.randn(5).double()
    step, sides = (1,) * (len(size) - 1), [((0, 0),) * (len(size) - 1)]
    assert is_product(x, [weight], step, sides)
    for other in ((x.detach().transpose(1, 2), [weight], step, sides), (x, [weight] * 2, step, sides)):
        assert not is_product(*other)
    assert not is_product(x, [weight], (2, *step[1:]), sides)
    assert not is_product(x, [weight], step, [((1, 1), *sides[0][1:])])
    with torch.no_grad():
        assert not is_product(x, [weight], step, sides)
    conv = F.conv2d if len(size) == 3 else F.conv3d
    found, right = pointwise(x, weight, bias), conv(x, weight, bias)
    assert found.is_contiguous(memory_format=layout)
    upstream = torch.randn_like(right)
    for ours, exact in zip(
        (found, *torch.autograd.grad(found, (x, weight), upstream)),
        (right, *torch.autograd.grad(right, (x, weight), upstream)),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact)


CROPPED = [((0, 0), (-1, -1)), ((-1, 2), (0, -2)), ((0, -1), (3, 0)), ((1, 2), (0, 1)), ((1, 1), (2, 2))]


@pytest.mark.parametrize("sides", CROPPED)
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_sides_are_cropped_and_padded(sides, mode):
    x, weight, ((top, bottom), (left, right)) = torch.randn(2, 3, 9, 8), torch.randn(3, 3, 3, 3), sides
    cropped = F.pad(x, [min(left, 0), min(right, 0), min(top, 0), min(bottom, 0)])
    expected = F.pad(cropped, [max(left, 0), max(right, 0), max(top, 0), max(bottom, 0)], mode=mode)
    assert torch.equal(pad_on_sides(x, list(sides), mode), expected)
    if mode == "constant":
        found = conv_on_sides(x, weight, None, list(sides), [1, 1], [1, 1])
        assert torch.allclose(found, F.conv2d(expected, weight), atol=1e-5)


def test_engines_see_no_negative_pads_where_a_conv_without_padding_is_split():
    """ncnn and ExecuTorch have none."""
    net = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)], padding=0))
    exported = torch.export.export(net, (torch.randn(2, 3, 8, 8),))
    assert not any("pad" in str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(exported.module()(torch.ones(2, 3, 8, 8)), net(torch.ones(2, 3, 8, 8)))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"), [((3, 1), (1, 3)), ((3, 3), (1, 1)), ((1, 1), (3, 3)), ((1, 5), (3, 1))]
)
def test_two_convs_in_a_chain_as_one(first, second, groups):
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    down = torch.randn(6, 4 // groups, *first, dtype=torch.float64)
    across = torch.randn(8, 6 // groups, *second, dtype=torch.float64)
    chain = F.conv2d(F.conv2d(x, down, groups=groups), across, groups=groups)
    assert torch.allclose(F.conv2d(x, compose(down, across, groups=groups), groups=groups), chain)
    with pytest.raises(ValueError, match="reach along one axis"):
        compose(torch.zeros(2, 2, 3, 1), torch.zeros(2, 2, 3, 1))
