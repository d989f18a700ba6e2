"""Plans: their text, and which kernels they name for which problem and device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import hopper_plan
from lowrank_cnn.kernels.conv.plans import KernelPlan, hopper_tiles, layout_of, plans, refusal, shortlist
from lowrank_cnn.kernels.problem import pose


def problem(channels=64, stride=1, size=56, batch=32, dtype=torch.bfloat16, **options):
    shapes, sides = [(64, channels, 3, 1), (64, channels, 1, 3)], [((1, 1), (0, 0)), ((0, 0), (1, 1))]
    return pose((batch, channels, size, size), shapes, dtype, stride=(stride, stride), padding=sides, **options)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    "posed",
    [
        problem(),
        problem(3),
        problem(20),
        problem(stride=2),
        problem(stride=2, size=57),
        problem(3, 2),
        problem(size=7),
    ],
)
def test_plans_run_their_problem_and_are_read_back_from_text(posed, capability):
    found = plans(posed, capability=capability)
    assert found
    assert len(set(found)) == len(found)
    for plan in found:
        assert refusal(plan.kernel, posed) is None
        assert KernelPlan.parse(str(plan)) == plan
    if capability[0] != 9:
        assert not {plan.kernel for plan in found} & {"hopper", "window", "overlap"}


def test_hopper_tiles_fit_a_multiprocessor():
    tiles = hopper_tiles(problem(), deepest=2)
    assert len(tiles) > 4
    assert all(hopper_plan.fits(problem(), tile) for tile in tiles)


@pytest.mark.parametrize("kernel", ["tiled", "hopper", "stem"])
def test_no_kernel_pools_what_it_may_not_reorder(kernel):
    assert "falls" in refusal(kernel, problem(activation="silu", pool="floor"))
    assert refusal("tiled", problem(activation="relu", pool="floor")) is None
    assert "overlapping" in refusal(kernel, problem(activation="relu", pool="3x3/2"))


def test_groups_of_different_lengths_run_lengthened_or_plain():
    shapes, sides = [(64, 64, 3, 3), (64, 64, 1, 1)], [((1, 1), (1, 1)), ((0, 0), (0, 0))]
    half = pose((32, 64, 56, 56), shapes, torch.bfloat16, stride=(1, 1), padding=sides)
    assert "do not run" in refusal("hopper", half)
    found = plans(half, capability=(9, 0))
    assert {plan.kernel for plan in found} == {"lengthened", "tiled"}
    # Without tuning, one plan of each is measured; other layers have a default.
    assert [plan.kernel for plan in shortlist(found)] == ["lengthened", "tiled"]
    assert shortlist(found)[0] == found[0]
    assert shortlist(plans(problem(), capability=(9, 0))) == plans(problem(), capability=(9, 0))[:1]
    assert {plan.kernel for plan in plans(half, capability=(8, 0))} == {"tiled"}
    assert refusal("lengthened", problem()) == "groups that cannot be lengthened, or need not be"


def test_layouts_are_known_by_a_plans_text():
    assert layout_of("tiled-p32-f16-d16-w4-s3") == "rows"
    assert layout_of("window-s3-r3") == "windows"
