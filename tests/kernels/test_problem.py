"""A problem: its sizes, its counts, and what cannot be posed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.problem import describe, empty_codes, empty_result, pixels_last, pose
from lowrank_cnn.kernels.reference import composite_reference, enclosed

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
    assert empty_result(posed, x).shape == right.shape
    assert (empty_codes(posed, x) is not None) is (pool in ("floor", "ceil"))


def test_padding_is_found_again():
    odd = [((2, 0), (1, 1)), ((0, 0), (3, 1))]
    posed = pose((1, 3, 8, 8), [(4, 3, 3, 3), (4, 3, 1, 5)], torch.float32, stride=(1, 1), padding=odd)
    assert posed.padding == odd


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


def test_counts():
    assert problem().macs == 2 * 42 * 3 * (3 * 4 + 3 * 6)
    assert problem().bytes == 2 * (2 * 42 * 3 + 2 * 42 * 10 + 3 * 30)
    assert str(problem(relu=True, pool="floor")) == "2x3x7x6 3x1,4+1x3,6 /1x1,relu,pool-floor float16"


def test_a_pool_goes_first_only_where_the_order_of_values_is_kept():
    assert problem(relu=True, pool="floor").can_pool_first
    assert not problem(activation="gelu", pool="floor").can_pool_first
    assert not replace(problem(pool="floor"), residual=True).can_pool_first


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pool": "mean"}, "pool is None"),
        ({"padding": SIDES[:1]}, "2 filter groups need as many paddings"),
        ({"padding": [SIDES[0], SIDES[0]]}, r"one output size, not \d+x\d+ and \d+x\d+\."),
    ],
)
def test_what_cannot_be_posed(options, why):
    with pytest.raises(LowRankError, match=why):
        problem(**options)


def test_pixels_are_copied_only_if_they_must_be():
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert pixels_last(last).data_ptr() == last.data_ptr()
    assert torch.equal(pixels_last(x), x.permute(0, 2, 3, 1))
    assert pixels_last(torch.randn(1, 8, 1, 1)).stride() == (8, 8, 8, 1)
