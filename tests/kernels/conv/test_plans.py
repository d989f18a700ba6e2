"""Plans: which kernels are measured for which layer on which GPU, and how one adds a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowrank_cnn.kernels import composite_conv2d, explain, forced, unsupported
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.autotune import tuned
from lowrank_cnn.kernels.conv import hopper_plan
from lowrank_cnn.kernels.conv import plans as module
from lowrank_cnn.kernels.conv.equivalent import is_worth_enclosing, lengthened
from lowrank_cnn.kernels.conv.hopper_plan import RUNS, HopperTile
from lowrank_cnn.kernels.conv.pack import ROWS
from lowrank_cnn.kernels.conv.plans import KernelPlan, plans, preset, refusal, shape_of, shortlist
from lowrank_cnn.kernels.problem import (
    ConvTensors,
    ForwardKernel,
    Problem,
    empty_result,
    pixels_last,
    pose,
)
from tests.kernels.helpers import DEVICE, assert_close, posed, same

LOW_RANK, HALF = [(3, 1, 64), (1, 3, 64)], [(3, 3, 64), (1, 1, 64)]
ANY, OLDER, HOPPER = (0, 0), (8, 0), (9, 0)


def problem(groups=LOW_RANK, channels=64, stride=1, size=56, batch=32, dtype=torch.bfloat16, **options):
    shapes, sides = [(f, channels, h, w) for h, w, f in groups], [same(h, w) for h, w, _ in groups]
    return pose((batch, channels, size, size), shapes, dtype, stride=(stride, stride), padding=sides, **options)


@pytest.mark.parametrize(
    ("posed", "capability", "kernels"),
    [
        (problem(), HOPPER, "hopper tiled"),
        (problem(), OLDER, "tiled"),
        (problem(), (10, 0), "tiled"),
        (problem(size=7), HOPPER, "tiled"),  # too few pixels for large tiles
        (problem(channels=3), HOPPER, "toeplitz stem"),
        (problem(channels=3, pool="floor", relu=True), HOPPER, "window stem"),
        (problem(channels=3, stride=2), HOPPER, "overlap toeplitz stem"),
        (problem([(7, 7, 16)], channels=3), OLDER, "toeplitz folded"),
        (problem([(3, 3, 16)], channels=16, size=224), HOPPER, "hopper toeplitz tiled"),
        (problem(channels=3, stride=2, pool="3x3/2"), HOPPER, "overlap"),
        (problem(channels=20), ANY, "toeplitz folded"),
        (problem(stride=2), HOPPER, "hopper tiled"),
        (problem(stride=2, size=57), HOPPER, "folded"),
        (problem(stride=3, size=57, channels=60), HOPPER, ""),
        (problem(HALF), HOPPER, "tiled"),
        (problem([(3, 1, 32), (3, 3, 32)]), HOPPER, "hopper enclosed tiled"),
        (problem(activation="silu", pool="floor"), HOPPER, ""),
    ],
)
def test_kernels_worth_measuring(posed, capability, kernels):
    found = plans(posed, capability=capability)
    assert list(dict.fromkeys(plan.kernel for plan in found)) == kernels.split()
    assert len(set(found)) == len(found)
    for plan in found:
        assert refusal(plan.kernel, posed) is None
        assert KernelPlan.parse(str(plan)) == plan
        if plan.kernel == "hopper":
            assert hopper_plan.fits(posed, plan.tile)


def test_without_tuning_one_plan_is_measured_unless_it_computes_zeros():
    found = plans(problem([(3, 1, 32), (3, 3, 32)]), capability=HOPPER)
    assert [plan.kernel for plan in shortlist(found)] == ["hopper", "enclosed", "tiled"]
    assert shortlist(found)[0] == found[0]
    few = plans(problem([(3, 3, 16)], channels=16, size=224), capability=HOPPER)
    assert [plan.kernel for plan in shortlist(few)] == ["hopper", "toeplitz", "tiled"]
    assert shortlist(plans(problem(), capability=HOPPER)) == plans(problem(), capability=HOPPER)[:1]


@pytest.mark.parametrize(
    ("kernel", "posed", "why"),
    [
        ("tiled", problem(activation="silu", pool="floor"), "falls"),
        ("stem", problem(activation="relu", pool="3x3/2"), "overlapping"),
        ("tiled", problem(channels=20), "not a multiple of 8"),
        ("tiled", problem(channels=24, stride=2), "not a multiple of 16"),
        ("tiled", problem(stride=2, size=57), "does not divide"),
        ("stem", problem(), "more than 64"),
        ("stem", problem([(3, 3, 264)], channels=3), "more than one program holds"),
        ("toeplitz", problem(), "more than 32"),
        ("toeplitz", problem(channels=3, pool="floor"), "a pool"),
        ("toeplitz", problem([(1, 1, 16)], channels=16), "share"),
        ("toeplitz", problem([(11, 11, 16)], channels=32), "do not fit"),
        ("folded", problem(), "no blocks"),
        ("enclosed", problem(), "need not be enclosed"),
        ("hopper", problem(HALF), "do not run 1, 3 or 5"),
        ("hopper", problem(dtype=torch.float32), "16-bit"),
        ("hopper", problem(channels=20), "input channels"),
        ("hopper", problem([(3, 1, 20), (1, 3, 20)]), "multiple of 8"),  # the second begins within a box
        ("hopper", problem([(3, 1, 24), (1, 3, 24)], pool="floor"), "multiple of 16"),
        ("hopper", problem([(3, 1, 8), (1, 3, 8)]), "fewer than 16"),
        ("hopper", problem(stride=2, size=57), "does not divide"),
        ("hopper", problem(channels=24, stride=2), "not a multiple of 16"),
        ("window", problem(channels=3), "no whole 2x2 windows"),
        ("window", problem(channels=5, pool="floor"), "channels"),
        ("window", problem([(5, 1, 16)], channels=3, pool="floor"), "neighbouring"),
        ("window", problem([(3, 3, 24)], channels=3, pool="floor"), "not a multiple of 16"),
        ("window", problem(channels=3, pool="floor", batch=1 << 20), "32 bits"),
        ("overlap", problem(channels=3), "stride of 2"),
        ("overlap", problem(channels=3, stride=2, pool="floor"), "2x2"),
        ("overlap", problem(channels=5, stride=2), "channels"),
        ("overlap", problem([(3, 3, 24)], channels=3, stride=2), "not a multiple of 16"),
        ("overlap", problem([(3, 3, 16)], channels=3, stride=2, batch=1 << 20), "32 bits"),
    ],
)
def test_refusals(kernel, posed, why):
    assert why in refusal(kernel, posed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stride": 2}, "stride"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"channels": 12}, "multiple of 8"),
        ({"groups": [(3, 1, 8)]}, "fewer than 16"),
        ({"groups": HALF}, "do not run"),
    ],
)
def test_refusals_of_the_weights_gradient(change, why):
    assert hopper_plan.weights_unsupported(problem()) is None
    assert why in hopper_plan.weights_unsupported(problem(**change))


@pytest.mark.parametrize(
    ("groups", "longer"),
    [
        ([(3, 3, 32), (1, 1, 32)], [(3, 3), (3, 1)]),
        ([(1, 5, 16), (3, 3, 48)], [(3, 5), (3, 3)]),  # ten taps more for few filters, not six for many
        ([(4, 1, 16), (1, 4, 16)], [(5, 1), (1, 5)]),
        ([(3, 1, 16), (1, 3, 16)], None),  # one length already
        ([(1, 1, 16), (1, 1, 16)], None),
        ([(7, 7, 16), (1, 1, 16)], None),
        ([(3, 1, 16), (1, 1, 64)], None),  # more than twice the products
    ],
)
def test_groups_get_the_length_that_adds_the_fewest_products(groups, longer):
    found = lengthened(problem(groups), RUNS)
    assert (found and [(group.height, group.width) for group in found.groups]) == longer
    assert lengthened(problem(groups, stride=2), RUNS) is None  # each tap is a run of its own


@pytest.mark.parametrize(
    ("groups", "worth"),
    [
        ([(3, 1, 16), (1, 3, 16), (1, 1, 16), (3, 3, 16)], True),  # tiles of 16 filters
        ([(3, 3, 44), (1, 1, 20)], True),  # no Hopper kernel takes them as they are
        (LOW_RANK, False),
        (HALF, False),
        ([(3, 3, 32)], False),
        ([(3, 1, 16), (1, 3, 16)], False),  # too many zeros
    ],
)
def test_narrow_groups_may_run_as_one(groups, worth):
    assert is_worth_enclosing(problem(groups)) is worth


def test_tiles_of_hopper_fit_and_cover_the_output():
    for layer in (problem(), problem(pool="floor", relu=True), problem([(3, 1, 24), (1, 3, 24)], size=13)):
        tile = hopper_plan.default_tile(layer)
        assert hopper_plan.fits(layer, tile)
        run, images, cross = box = hopper_plan.run_box(layer, tile)
        assert run * images * cross == tile.pixels
        covered = hopper_plan.box_total(layer, box) * tile.pixels
        assert covered >= layer.batch * layer.out_height * layer.out_width
    assert not hopper_plan.fits(problem(), HopperTile(256, 64, 64, 4, 8, 3, 1, 4))
    assert not hopper_plan.fits(problem(), HopperTile(128, 64, 64, 4, 2, 8))  # more slabs than boxes allow


def test_a_stored_plan_comes_first_where_it_was_measured(monkeypatch):
    known = problem([(3, 1, 128), (1, 3, 128)], channels=256, batch=256, relu=True, pool="floor")
    best = preset(known, HOPPER)
    assert plans(known, capability=HOPPER)[0] == KernelPlan.parse(best)
    others = [replace(known, batch=1), replace(known, dtype=torch.float32), replace(known, height=55)]
    assert [preset(other, HOPPER) for other in others] == [None] * 3
    assert preset(known, OLDER) is None
    first = problem([(3, 3, 16)], channels=3, size=8)
    stored = {"9.0": {shape_of(first): {"forward": "window-s3-r3"}}}
    monkeypatch.setattr(module, "table", lambda: stored)
    assert {plan.kernel for plan in plans(first, capability=HOPPER)} == {"toeplitz", "stem"}  # `window` refuses it


@pytest.mark.parametrize(
    ("posed", "training", "why"),
    [
        (problem(size=6, dtype=torch.float32), True, None),
        (problem(dtype=torch.float64), False, "float64 is not"),
        (problem(residual=True), False, None),
        (problem(residual=True), True, "no gradient for a residual"),
        (problem(activation="silu"), True, "no gradient for a residual or for this activation"),
        (problem(activation="silu", pool="floor"), False, "no kernel takes"),
        (problem(channels=3, stride=3), True, "no gradient for"),
    ],
)
def test_what_the_kernels_can_run_and_train(monkeypatch, posed, training, why):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:7")
    found = unsupported(posed, cpu, training=training)
    assert found == why if why is None else why in found
    if posed.channels == 3:  # the images of a first layer need no gradient
        assert unsupported(posed, cpu, training=True, need_input=False) is None
    monkeypatch.setattr(gpu, "capability_of", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert "older" in unsupported(posed, cuda)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert unsupported(problem(dtype=torch.float32), cuda) == "float32 without TF32"


# How to add a kernel, as CONTRIBUTING.md says it: a file with a tile, a kernel, a launcher and a record, and a row
# of KERNELS.


@dataclass(frozen=True)
class PointwiseTile:
    pixels: int = 16


@triton.jit
def pointwise(x, w, bias, y, pixels, CHANNELS: tl.constexpr, FILTERS: tl.constexpr, PIXELS: tl.constexpr):
    pixel, k, f = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, CHANNELS), tl.arange(0, FILTERS)
    inside = (pixel < pixels)[:, None]
    a = tl.load(x + pixel[:, None] * CHANNELS + k[None, :], mask=inside, other=0.0)
    b = tl.load(w + f[None, :] * CHANNELS + k[:, None])
    out = tl.dot(a, b) + tl.load(bias + f)[None, :]
    tl.store(y + pixel[:, None] * FILTERS + f[None, :], out, mask=inside)


def launch_pointwise(problem: Problem, given: ConvTensors, tile: PointwiseTile) -> torch.Tensor:
    maps, pixels = empty_result(problem, given.x), problem.batch * problem.height * problem.width
    pointwise[(-(-pixels // tile.pixels),)](
        pixels_last(given.x), given.packed, given.bias, maps.permute(0, 2, 3, 1), pixels,
        CHANNELS=problem.channels, FILTERS=problem.filters, PIXELS=tile.pixels,
    )  # fmt: skip
    return maps


POINTWISE = ForwardKernel(
    PointwiseTile,
    lambda problem, capability: [PointwiseTile()],
    lambda problem: None if problem.groups[0].taps == 1 and problem.stride == (1, 1) else "no pointwise conv",
    ROWS,
    launch_pointwise,
)


def test_a_new_kernel_is_a_record_and_a_row(monkeypatch):
    caches = (refusal, tuned.plans_of, tuned._unable, KernelPlan.parse)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(module, "KERNELS", {"pointwise": POINTWISE, **module.KERNELS})
    monkeypatch.setattr("lowrank_cnn.kernels.conv.forward.KERNELS", module.KERNELS)
    layer = posed((2, 16, 5, 5), [(1, 1, 32)])
    with forced("on"), torch.no_grad():
        assert "fused pointwise-p16" in explain(layer.problem, DEVICE)
        y = composite_conv2d(layer.x, layer.weights, layer.bias, padding=layer.options["padding"])
    assert_close(y, layer.right)
    for cached in caches:
        cached.cache_clear()
