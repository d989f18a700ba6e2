"""How the gradients are divided for the plain kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import backward as backward_plan
from lowrank_cnn.kernels.problem import describe, pose
from tests.kernels.helpers import same


def test_groups_that_add_up_have_no_single_convolution():
    weights = [torch.zeros(8, 8, 3, 1), torch.zeros(8, 8, 1, 3)]
    x = torch.zeros(1, 8, 5, 5)
    assert backward_plan.turned(describe(x, weights, stride=(1, 1), padding=[same(3, 1), same(1, 3)])) is None
    assert backward_plan.turned(describe(x, weights[:1], stride=(2, 2), padding=[same(3, 1)])) is None


@pytest.mark.parametrize(
    ("channels", "filters", "narrow"), [(256, 128, False), (512, 256, False), (192, 96, True)]
)
def test_tiles_of_the_gradients_are_narrow_where_wide_ones_would_be_half_empty(channels, filters, narrow):
    x = torch.zeros(1, channels, 8, 8)
    weights = [torch.zeros(filters, channels, 3, 1), torch.zeros(filters, channels, 1, 3)]
    problem = describe(x, weights, stride=(1, 1), padding=[same(3, 1), same(1, 3)])
    assert (backward_plan.input_tile(problem).filters < 128) == narrow
    assert (backward_plan.weight_tile(problem).depth < 128) == narrow


def test_fetches_begin_every_sixteen_bytes():
    """The second group begins at filter 12, within a fetch of eight: four of the first group's come along."""
    shapes, padding = [(12, 16, 3, 1), (12, 16, 1, 3)], [same(3, 1), same(1, 3)]
    problem = pose((1, 16, 6, 6), shapes, torch.bfloat16, stride=(1, 1), padding=padding)
    assert backward_plan.leads(problem) == [0, 4]
    first, second = backward_plan.input_rows(problem, depth=16)
    assert (first.channel, second.channel) == (0, 8)
    assert (first.steps, second.steps) == (1, 1)
    assert second.weight_row == 3 * 16
    (_, row), tiles = backward_plan.weight_rows(problem, filters=16, depth=16)
    assert (row.first_tile, row.lead, tiles) == (3, 4, 6)
