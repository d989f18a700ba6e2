"""How a problem is divided for the Hopper kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import hopper_plan
from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, unsupported
from lowrank_cnn.kernels.problem import describe, pose

SIDES = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


def low_rank(filters=64, size=16, **options):
    shapes = [(filters, 64, 3, 1), (filters, 64, 1, 3)]
    return pose((8, 64, size, size), shapes, torch.bfloat16, stride=(1, 1), padding=SIDES, **options)


@pytest.mark.parametrize(
    ("filters", "pool", "taken"), [(24, None, True), (24, "floor", False), (32, "floor", True), (20, None, False)]
)
def test_groups_begin_where_boxes_may(hopper_model, filters, pool, taken):
    """Two groups of 20 filters are five whole boxes of 8, but the second begins within one."""
    x, weights = torch.empty(1, 16, 8, 8, dtype=torch.bfloat16), [torch.empty(filters, 16, 3, 1)] * 2
    padding = [hopper_model.same(3, 1)] * 2
    problem = describe(x, weights, stride=(1, 1), padding=padding, relu=True, pool=pool)
    assert (unsupported(problem) is None) is taken


def test_the_default_tile_fits_and_its_boxes_cover_the_output():
    for problem in (low_rank(), low_rank(pool="floor", relu=True), low_rank(24, 13)):
        tile = hopper_plan.default_tile(problem)
        assert hopper_plan.fits(problem, tile)
        run, images, cross = box = hopper_plan.run_box(problem, tile)
        assert run * images * cross == tile.pixels
        covered = hopper_plan.box_total(problem, box) * tile.pixels
        assert covered >= problem.batch * problem.out_height * problem.out_width


def test_a_tile_that_needs_too_much_memory_does_not_fit():
    assert not hopper_plan.fits(low_rank(), HopperTile(256, 64, 64, 4, 8, 3, 1, 4))
    assert not hopper_plan.fits(low_rank(), HopperTile(128, 64, 64, 4, 2, 8))  # more slabs than boxes allow


def test_runs_of_either_direction():
    down, across = hopper_plan.run_rows(low_rank(), 64)
    assert (down.turned, across.turned) == (0, 1)
    assert (down.before, across.before) == (1, 1)
    assert (across.first_tile, across.channel, across.weight_row) == (1, 64, 3 * 64)
