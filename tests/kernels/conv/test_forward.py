"""Every forward kernel against float64: which kernels take a layer, and that all of them compute it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels import composite_conv2d_with_statistics, forced
from lowrank_cnn.kernels.conv import forward
from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, OverlapTile, WindowTile
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan, refusal
from lowrank_cnn.kernels.conv.stem import StemTile
from lowrank_cnn.kernels.conv.tiled import Tile, activated
from lowrank_cnn.kernels.conv.toeplitz import ToeplitzTile
from lowrank_cnn.kernels.problem import ConvTensors, empty_codes
from tests.kernels.helpers import DEVICE, GPU, assert_close, channels_last, posed, winners

PLAIN = {
    "tiled": Tile(32, 16, 16),
    "stem": StemTile(32),
    "folded": Tile(32, 16, 16),
    "toeplitz": ToeplitzTile(16),
}
SMALL = HopperTile(pixels=32, filters=16, depth=16, boxes=2, slabs=2, parts=1)
GLUON = {"hopper": SMALL, "enclosed": SMALL, "window": WindowTile(2, 1), "overlap": OverlapTile(2, 2, 1)}
LOW_RANK, STEM = [(3, 1, 16), (1, 3, 24)], [(7, 1, 16), (1, 7, 16)]
TWO, LAST = {"stride": (2, 2)}, {"residual": True, "add_last": True}
CASES = {
    "odd size, ragged groups": (
        (2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], {"relu": True}, "hopper toeplitz tiled",
    ),
    "three groups, pool": (
        (3, 16, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 16)], {"relu": True, "pool": "floor"},
        "hopper enclosed tiled",
    ),
    "five taps, clipped pool": (
        (1, 32, 11, 6), [(5, 1, 16), (1, 5, 16)], {"activation": "leaky_relu:0.2", "pool": "ceil"},
        "hopper tiled",
    ),
    "pointwise": ((2, 40, 7, 5), [(1, 1, 32)], {"bias": False}, "stem hopper tiled"),
    "residual": (
        (1, 16, 5, 9), [(3, 3, 32)], {"residual": True, "activation": "silu"}, "hopper toeplitz tiled",
    ),
    "residual added last": (
        (1, 24, 6, 6), LOW_RANK, {**LAST, "activation": "gelu"}, "hopper toeplitz tiled",
    ),
    "narrow groups": (
        (2, 16, 6, 7), [(3, 1, 16), (3, 3, 24), (3, 3, 16)], {"activation": "hardswish"},
        "hopper toeplitz enclosed tiled",
    ),
    "maps of one pixel": ((2, 16, 1, 1), [(3, 1, 16), (1, 3, 8)], {"relu": True}, "toeplitz tiled"),
    "stride 2": (
        (2, 16, 8, 12), LOW_RANK, {**TWO, "residual": True, "relu": True}, "hopper toeplitz tiled folded",
    ),
    "stride 2, rows only": (
        (1, 16, 10, 8), [(5, 1, 16), (1, 5, 16)], {"stride": (2, 1), "pool": "floor"},
        "hopper tiled folded",
    ),
    "stride 3": (
        (1, 16, 9, 9), [(3, 3, 8)], {"stride": (3, 3), "padding": [((0, 0), (0, 0))]}, "toeplitz tiled",
    ),
    "cropped": (
        (1, 8, 7, 7), [(3, 3, 8), (1, 1, 8)], {"padding": [((0, 1), (1, 0)), ((-1, 0), (0, -1))]},
        "toeplitz enclosed tiled",
    ),
    "odd size at stride 2": ((1, 16, 7, 9), [(3, 3, 16)], TWO, "toeplitz folded"),
    "ragged filters": ((1, 20, 7, 6), [(3, 1, 7), (1, 3, 6)], {**TWO, "relu": True}, "toeplitz"),
    "first layer": (
        (2, 3, 12, 34), [(3, 1, 8), (1, 3, 8)], {"relu": True, "pool": "floor"}, "window stem folded",
    ),
    "dense first layer, odd size": (
        (1, 3, 17, 21), [(3, 3, 32)], {"relu": True, "pool": "floor"}, "window stem folded",
    ),
    "four channels": (
        (2, 4, 10, 6), [(3, 3, 32), (1, 1, 16)], {"pool": "ceil"}, "window stem folded",
    ),
    "grey": (
        (1, 1, 5, 5), [(5, 1, 8), (1, 5, 8), (1, 1, 4)], {**LAST, "activation": "relu"}, "toeplitz stem",
    ),
    "stem with its pool": ((2, 3, 22, 30), STEM, {**TWO, "pool": "3x3/2", "relu": True}, "overlap"),
    "stem of several tiles": ((1, 3, 9, 262), [(3, 3, 48)], {**TWO, "pool": "3x3/2"}, "overlap"),
    "dense stem": (
        (1, 3, 30, 22), [(7, 7, 32)], {**TWO, "activation": "silu"}, "overlap toeplitz folded",
    ),
    "stem of a large map": ((2, 3, 10, 11), [(7, 7, 16)], {"relu": True}, "toeplitz folded"),
    "even taps": (
        (3, 4, 10, 9), [(4, 4, 16)], {**TWO, "padding": [((1, 1), (1, 1))]}, "overlap toeplitz stem folded",
    ),
    "stem, rows of stride 1": ((1, 3, 16, 16), [(3, 3, 16)], {"stride": (1, 2), "pool": "3x3/2"}, "overlap"),
}  # fmt: skip
"""The size of the input, the groups (height, width, filters), the options, and the kernels that take it."""


def run(kernel, layer, tile, codes=None, result=None):
    packed = KERNELS[kernel].layout.pack(layer.weights, layer.problem, layer.x.dtype)
    given = ConvTensors(layer.x, packed, layer.bias, codes, layer.residual, result=result)
    return forward.run_packed(KernelPlan(kernel, tile), layer.problem, given)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_that_take_a_layer(name):
    size, groups, options, kernels = CASES[name]
    problem = replace(posed(size, groups, **options).problem, dtype=torch.bfloat16)
    assert {kernel for kernel in KERNELS if refusal(kernel, problem) is None} == set(kernels.split())


COMPUTED = [(name, kernel) for name, case in CASES.items() for kernel in case[3].split()]


@pytest.mark.parametrize(("name", "kernel"), COMPUTED)
def test_each_of_them_computes_it(request, monkeypatch, name, kernel):
    size, groups, options, _ = CASES[name]
    layer = posed(size, groups, **options)
    if kernel in GLUON:
        request.getfixturevalue("hopper")
    elif refusal(kernel, layer.problem) is not None:
        pytest.skip("in float32 the channels need no blocks")
    else:
        module = __import__(KERNELS[kernel].launch.__module__, fromlist=["empty_result"])
        fill = getattr(module, "empty_result", None)
        if fill is not None:
            monkeypatch.setattr(module, "empty_result", lambda *args: fill(*args).fill_(torch.nan))
    tile = (PLAIN | GLUON)[kernel]
    y = run(kernel, layer, tile)
    assert_close(y, layer.right)
    assert y.is_contiguous(memory_format=torch.channels_last)
    if layer.problem.pool is None:  # some channels of larger maps, whose others stay
        maps, added = (channels_last(torch.full_like(y, 7.0).repeat(1, 3, 1, 1)) for _ in range(2))
        part = maps[:, y.shape[1] : 2 * y.shape[1]]
        if layer.residual is not None:
            layer.residual = added[:, y.shape[1] : 2 * y.shape[1]].copy_(layer.residual)
        assert run(kernel, layer, tile, result=part) is part
        assert_close(part, layer.right)
        assert (maps.view(y.shape[0], 3, *y.shape[1:])[:, [0, 2]] == 7).all()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="not in Triton's interpreter")),
    ],
)
def test_sixteen_bits(dtype):
    layer = posed((1, 32, 8, 8), LOW_RANK, dtype=dtype, relu=True)
    assert_close(run("tiled", layer, PLAIN["tiled"]), layer.right, 2e-3 if dtype == torch.float16 else 1e-2)


HOPPER_TILES = [
    pytest.param(HopperTile(32, 16, 16, 4, 2, 4, 2, 2), "floor", id="two parts, a deep ring of weights"),
    pytest.param(HopperTile(32, 16, 16, 4, 3, 5, 1, 1), None, id="three boxes in flight"),
    pytest.param(HopperTile(32, 16, 16, 4, 2, 0, 1, 1), None, id="weights stay"),
    pytest.param(HopperTile(32, 16, 16, 4, 3, 0, 2, 1), "ceil", id="weights stay, three boxes"),
]


@pytest.mark.parametrize(("tile", "pool"), HOPPER_TILES)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_rings_of_buffers(hopper, tile, pool, stride):
    """Each tile keeps other numbers of fetches in flight; weights that stay are fetched once."""
    pool = pool if stride == (1, 1) else None
    layer = posed((4, 32, 12, 20), [(3, 1, 16), (1, 3, 16), (3, 3, 32)], stride=stride, relu=True, pool=pool)
    tile = tile if stride == (1, 1) else replace(tile, slabs=min(tile.slabs, 2))
    assert_close(run("hopper", layer, tile), layer.right)
    if not tile.slabs:
        fetched, hopper.machine.fetched = hopper.machine.fetched, 0
        run("hopper", layer, SMALL)
        assert fetched < hopper.machine.fetched


@pytest.mark.parametrize("pool", ["floor", "ceil"])
@pytest.mark.parametrize("kernel", ["tiled", "stem", "hopper", "window"])
def test_codes_name_the_winners_of_a_pool(request, kernel, pool):
    """The place of a winner in a value's lowest bits must not lift a zero above zero, either."""
    if kernel in GLUON:
        request.getfixturevalue("hopper")
    size = (1, 3 if kernel in ("stem", "window") else 16, *((8, 10) if kernel == "window" else (9, 7)))
    layer = posed(size, [(3, 1, 16), (1, 3, 16)], bias=False, relu=True, pool=pool)
    codes = empty_codes(layer.problem, layer.x)
    run(kernel, layer, (PLAIN | GLUON)[kernel], codes)
    assert torch.equal(codes.long(), winners(layer))
    layer.x = torch.zeros_like(layer.x)
    assert not run(kernel, layer, (PLAIN | GLUON)[kernel], codes).any()
    assert (codes == 4).all()


def test_what_a_launch_refuses():
    layer = posed((1, 8, 6, 6), [(3, 3, 8)], residual=True)
    layer.residual = layer.residual[..., :5]
    with pytest.raises(LowRankError, match="the residual is 1x8x6x5; it must be 1x8x6x6"):
        run("tiled", layer, PLAIN["tiled"])


STATISTICS = [
    pytest.param("tiled", (2, 8, 9, 7), (1, 1), id="tiled, odd size"),
    pytest.param("tiled", (3, 16, 8, 6), (2, 2), id="tiled, stride 2"),
    pytest.param("stem", (2, 3, 9, 7), (1, 1), id="read again"),
    pytest.param("hopper", (2, 16, 9, 7), (1, 1), id="hopper"),
    pytest.param("hopper", (3, 16, 6, 10), (2, 2), id="hopper, stride 2"),
    pytest.param("enclosed", (2, 16, 9, 7), (1, 1), id="enclosed"),
]


@pytest.mark.parametrize(("kernel", "size", "stride"), STATISTICS)
def test_mean_and_variance_come_from_the_epilogue(request, monkeypatch, kernel, size, stride):
    layer = posed(size, [(3, 1, 16), (1, 3, 24)], stride=stride)
    packed = KERNELS[kernel].layout.pack(layer.weights, layer.problem, layer.x.dtype)
    given = ConvTensors(layer.x, packed, layer.bias)
    tile = replace(SMALL, pixels=64) if kernel in GLUON else PLAIN[kernel]
    with monkeypatch.context() as patched:
        if kernel in GLUON:  # the model and Triton's interpreter do not run at the same time
            request.getfixturevalue("hopper")
            patched.setattr(forward, "launch_merge", lambda parts: parts)
        y, found = forward.run_with_statistics(KernelPlan(kernel, tile), layer.problem, given)
    if kernel in GLUON:
        monkeypatch.undo()
        assert found[0].sum(0).eq(y.numel() // y.shape[1]).all()
        found = forward.launch_merge(found)
    assert_close(y, layer.right)
    variance, mean = torch.var_mean(layer.right, (0, 2, 3), correction=0)
    assert_close(found, torch.stack([mean, variance]))


def test_a_large_mean_leaves_the_variance_its_digits():
    y = (1000 + torch.randn(2, 8, 100, 100, device=DEVICE)).contiguous(memory_format=torch.channels_last)
    parts = forward.launch_parts(y)
    assert parts.shape[1] > forward.MERGED  # merged in turns
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    assert_close(forward.launch_merge(parts), torch.stack([mean, variance]), 1e-5)


def test_a_batch_norm_behind_statistics_trains():
    """Statistics have no gradient of their own: the norm's backward accounts for them."""
    layer = posed((2, 16, 6, 5), [(3, 1, 8), (1, 3, 8)])
    leaves = [t.requires_grad_() for t in (layer.x, layer.bias, *layer.weights)]
    with forced("on"):
        y, *found = composite_conv2d_with_statistics(layer.x, layer.weights, layer.bias, **layer.options)
    assert not any(part.requires_grad for part in found)
    variance, mean = torch.var_mean(layer.right, (0, 2, 3), correction=0)
    ours = [y, *found, *torch.autograd.grad(y, leaves, layer.grad)]
    for part, right in zip(ours, [layer.right, mean, variance, *layer.gradients], strict=True):
        assert_close(part, right)


@triton.jit
def activate(x, y, NAME: tl.constexpr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(y + place, activated(tl.load(x + place), NAME, 0.1))


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "hardswish"])
def test_activations_are_exact_to_float32_and_keep_nan(name):
    x = torch.linspace(-20, 20, 4096, device=DEVICE)
    x[0] = torch.nan
    y = torch.empty_like(x)
    activate[(1,)](x, y, NAME=name, COUNT=4096)
    assert y[0].isnan()
    right = getattr(torch.nn.functional, name)(x[1:].double())
    assert ((y[1:] - right).abs() <= 5e-7 * right.abs().clamp_min(1)).all()
