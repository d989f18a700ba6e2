"""Every forward kernel against float64: odd sizes, batch 1, ragged channels, borders, strides, pools."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import gather, launch, stem, tiled
from lowrank_cnn.kernels.conv.pack import pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference
from lowrank_cnn.system.errors import LowRankError

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMITS = {torch.float32: 2e-3 if GPU else 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

LOW_RANK = [(3, 1, 16), (1, 3, 8)]
MIXTURE = [(3, 1, 8), (1, 3, 8), (3, 3, 8)]


def same(height, width):
    rows, columns = (height - 1) // 2, (width - 1) // 2
    return (rows, height - 1 - rows), (columns, width - 1 - columns)


def pose(size, groups, *, dtype=torch.float32, bias=True, stride=(1, 1), padding=None, **options):
    """Fresh inputs, the problem they pose, and its float64 answer."""
    return posed(size, groups, dtype=dtype, bias=bias, stride=stride, padding=padding, **options)[:-1]


def posed(size, groups, *, dtype=torch.float32, bias=True, stride=(1, 1), padding=None, residual=False, **options):
    """As `pose`, and last the residual, if there is one."""
    x = torch.randn(size, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(f, size[1], h, w, device=DEVICE).div_(h * w).to(dtype) for h, w, f in groups]
    b = torch.randn(sum(f for *_, f in groups), device=DEVICE) if bias else None
    options |= {"stride": stride, "padding": padding or [same(h, w) for h, w, _ in groups]}
    problem = describe(x, weights, residual=residual, **options)
    added = None
    if residual:
        maps = torch.randn(problem.batch, problem.filters, *problem.result_size, device=DEVICE)
        added = maps.to(dtype).contiguous(memory_format=torch.channels_last)
    numbers = [x.double(), [w.double() for w in weights], b if b is None else b.double()]
    exact = composite_reference(*numbers, **options, residual=added if added is None else added.double())
    return x, weights, b, problem, exact, added


def poison(monkeypatch, module):
    """Memory for results comes full of NaN, so that what is never written shows."""
    fill = module.empty_result
    monkeypatch.setattr(module, "empty_result", lambda *args: fill(*args).fill_(torch.nan))


def agrees(y, exact, dtype):
    assert y.shape == exact.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.linalg.vector_norm(y - exact) <= LIMITS[dtype] * torch.linalg.vector_norm(exact)


SHAPES = [
    pytest.param((2, 24, 9, 7), LOW_RANK, {"relu": True}, id="odd size"),
    pytest.param((1, 16, 6, 10), MIXTURE, {"relu": True, "pool": "floor"}, id="batch 1, mixture, pool"),
    pytest.param((2, 8, 7, 5), LOW_RANK, {"relu": True, "pool": "ceil"}, id="clipped windows"),
    pytest.param((1, 16, 7, 5), LOW_RANK, {"pool": "floor"}, id="dropped last row"),
    pytest.param((1, 40, 8, 8), [(5, 1, 8), (1, 5, 16)], {"bias": False}, id="five taps, ragged channels"),
    pytest.param((1, 8, 9, 9), [(7, 1, 8), (1, 7, 8)], {"relu": True}, id="seven taps"),
    pytest.param((2, 16, 5, 6), [(1, 1, 24)], {}, id="pointwise"),
    pytest.param((2, 16, 1, 1), LOW_RANK, {"relu": True}, id="maps of one pixel"),
    pytest.param((1, 8, 6, 6), [(3, 3, 8)], {"padding": [((0, 0), (0, 0))]}, id="no padding"),
    pytest.param(
        (1, 8, 7, 7), [(3, 3, 8), (1, 1, 8)], {"padding": [((0, 1), (1, 0)), ((-1, 0), (0, -1))]}, id="cropped"
    ),
]


@pytest.mark.parametrize(("size", "groups", "options"), SHAPES)
def test_tiled(monkeypatch, size, groups, options):
    poison(monkeypatch, tiled)
    x, weights, bias, problem, exact = pose(size, groups, **options)
    assert tiled.unsupported(problem) is None
    tile = tiled.Tile(pixels=32, filters=16, depth=16)
    agrees(tiled.launch_tiled(problem, x, pack_rows(weights, x.dtype), bias, tile), exact, x.dtype)


SIXTEEN_BITS = [
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="the interpreter has no bfloat16 products")
    ),
    torch.float16,
]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_tiled_in_sixteen_bits(monkeypatch, dtype):
    poison(monkeypatch, tiled)
    x, weights, bias, problem, exact = pose((1, 32, 8, 8), LOW_RANK, dtype=dtype, relu=True)
    tile = tiled.Tile(pixels=32, filters=16, depth=32)
    agrees(tiled.launch_tiled(problem, x, pack_rows(weights, dtype), bias, tile), exact, dtype)


FIRST_LAYERS = [
    pytest.param((2, 3, 9, 7), [(3, 1, 8), (1, 3, 8)], {"relu": True, "pool": "floor"}, id="low-rank, pool"),
    pytest.param((1, 3, 8, 6), [(3, 3, 20)], {"relu": True}, id="dense, ragged filters"),
    pytest.param(
        (1, 3, 11, 9), [(7, 1, 8), (1, 7, 8)], {"stride": (2, 2), "pool": "ceil"}, id="stride 2, clipped"
    ),
    pytest.param((1, 1, 5, 5), [(5, 1, 8), (1, 5, 8), (1, 1, 4)], {"bias": False}, id="grey"),
    pytest.param((1, 4, 7, 8), [(3, 1, 8), (1, 3, 8)], {"stride": (1, 2)}, id="uneven stride"),
]


@pytest.mark.parametrize(("size", "groups", "options"), FIRST_LAYERS)
def test_stem(monkeypatch, size, groups, options):
    poison(monkeypatch, stem)
    x, weights, bias, problem, exact = pose(size, groups, **options)
    assert stem.unsupported(problem) is None
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    agrees(stem.launch_stem(problem, x, packed, bias, stem.StemTile(pixels=32)), exact, x.dtype)


@pytest.mark.parametrize(("size", "groups", "options"), FIRST_LAYERS)
def test_gather(monkeypatch, size, groups, options):
    poison(monkeypatch, gather)
    x, weights, bias, problem, exact = pose(size, groups, **options)
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    tile = gather.GatherTile(pixels=32, filters=16, depth=16)
    agrees(gather.launch_gather(problem, x, packed, bias, tile), exact, x.dtype)


def test_gather_takes_many_channels_at_stride_two():
    x, weights, bias, problem, exact = pose((1, 20, 7, 6), LOW_RANK, stride=(2, 2), relu=True)
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    agrees(
        gather.launch_gather(problem, x, packed, bias, gather.GatherTile(pixels=16, filters=32)), exact, x.dtype
    )


STRIDED = [
    pytest.param((2, 16, 8, 6), [(3, 1, 16), (1, 3, 8)], {"activation": "relu"}, id="low-rank"),
    pytest.param((1, 48, 6, 8), [(3, 3, 24)], {}, id="dense, ragged channels and filters"),
    pytest.param((3, 32, 4, 4), [(1, 1, 16)], {"residual": True, "activation": "relu"}, id="pointwise"),
    pytest.param((1, 16, 10, 8), [(5, 1, 8), (1, 5, 8)], {"stride": (2, 1), "pool": "floor"}, id="rows only"),
    pytest.param((1, 16, 8, 8), [(7, 7, 8)], {"padding": [((3, 2), (2, 3))]}, id="seven taps, uneven padding"),
    pytest.param((1, 16, 9, 9), [(3, 3, 8)], {"stride": (3, 3), "padding": [((0, 0), (0, 0))]}, id="stride 3"),
    pytest.param((1, 16, 8, 8), [(2, 2, 8)], {"padding": [((-1, 0), (0, -1))]}, id="cropped"),
]


@pytest.mark.parametrize(("size", "groups", "options"), STRIDED)
def test_tiled_at_a_stride(monkeypatch, size, groups, options):
    """The image is read in place, by parity of its rows and columns."""
    poison(monkeypatch, tiled)
    x, weights, bias, problem, exact, added = posed(size, groups, **{"stride": (2, 2), **options})
    assert tiled.unsupported(problem) is None
    tile = tiled.Tile(pixels=32, filters=16, depth=32)
    packed = pack_rows(weights, x.dtype)
    agrees(tiled.launch_tiled(problem, x, packed, bias, tile, residual=added), exact, x.dtype)


@pytest.mark.parametrize(("size", "why"), [((1, 16, 7, 8), "does not divide"), ((1, 24, 8, 8), "multiple of 16")])
def test_tiled_refuses_what_it_could_only_read_with_its_neighbours(size, why):
    problem = pose(size, [(3, 3, 8)], stride=(2, 2))[3]
    assert why in tiled.unsupported(problem)


ACTIVATIONS = ["relu", "leaky_relu", "leaky_relu:0.2", "silu", "gelu", "hardswish", None]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", ["tiled", "stem", "gather"])
def test_epilogues(monkeypatch, kernel, activation, residual):
    """Bias, residual and activation of every plain kernel, with filters that fill no whole tile."""
    module = {"tiled": tiled, "stem": stem, "gather": gather}[kernel]
    poison(monkeypatch, module)
    size = (2, 8 if kernel == "tiled" else 3, 5, 7)
    how = {"activation": activation, "residual": residual}
    x, weights, bias, problem, exact, added = posed(size, [(3, 1, 8), (1, 3, 16)], **how)
    plan = {
        "tiled": KernelPlan("tiled", tiled.Tile(pixels=32, filters=16, depth=16)),
        "stem": KernelPlan("stem", stem.StemTile(pixels=32)),
        "gather": KernelPlan("gather", gather.GatherTile(pixels=32, filters=16, depth=16)),
    }[kernel]
    y = launch.forward(plan, problem, x, weights, bias, residual=added)
    agrees(y, exact, x.dtype)


def test_a_residual_of_another_size_is_refused():
    x, weights, bias, problem, _, added = posed((1, 8, 6, 6), [(3, 3, 8)], residual=True)
    with pytest.raises(LowRankError, match="the residual is 1x8x6x5; it must be 1x8x6x6"):
        launch.forward(KernelPlan("tiled", tiled.Tile()), problem, x, weights, bias, residual=added[..., :5])
