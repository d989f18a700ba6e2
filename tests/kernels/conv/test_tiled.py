"""The plain Triton forward against float64: odd sizes, batch 1, ragged channels, borders, strides, pools."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import tiled
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.problem import ConvTensors

GPU = torch.cuda.is_available()
LOW_RANK = [(3, 1, 16), (1, 3, 8)]
MIXTURE = [(3, 1, 8), (1, 3, 8), (3, 3, 8)]
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
def test_tiled(layers, monkeypatch, size, groups, options):
    layers.poison(monkeypatch, tiled)
    x, weights, bias, problem, exact, _ = layers.posed(size, groups, **options)
    assert tiled.unsupported(problem) is None
    tile = tiled.Tile(pixels=32, filters=16, depth=16)
    layers.assert_agrees(
        tiled.launch_tiled(problem, ConvTensors(x, pack_rows(weights, x.dtype), bias), tile), exact, x.dtype
    )


SIXTEEN_BITS = [
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="the interpreter has no bfloat16 products")
    ),
    torch.float16,
]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_tiled_in_sixteen_bits(layers, monkeypatch, dtype):
    layers.poison(monkeypatch, tiled)
    x, weights, bias, problem, exact, _ = layers.posed((1, 32, 8, 8), LOW_RANK, dtype=dtype, relu=True)
    tile = tiled.Tile(pixels=32, filters=16, depth=32)
    layers.assert_agrees(
        tiled.launch_tiled(problem, ConvTensors(x, pack_rows(weights, dtype), bias), tile), exact, dtype
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
def test_tiled_at_a_stride(layers, monkeypatch, size, groups, options):
    """The image is read in place, by parity of its rows and columns."""
    layers.poison(monkeypatch, tiled)
    x, weights, bias, problem, exact, added = layers.posed(size, groups, **{"stride": (2, 2), **options})
    assert tiled.unsupported(problem) is None
    tile = tiled.Tile(pixels=32, filters=16, depth=32)
    packed = pack_rows(weights, x.dtype)
    layers.assert_agrees(
        tiled.launch_tiled(problem, ConvTensors(x, packed, bias, residual=added), tile), exact, x.dtype
    )


@pytest.mark.parametrize(("size", "why"), [((1, 16, 7, 8), "does not divide"), ((1, 24, 8, 8), "multiple of 16")])
def test_tiled_refuses_what_it_could_only_read_with_its_neighbours(layers, size, why):
    problem = layers.posed(size, [(3, 3, 8)], stride=(2, 2))[3]
    assert why in tiled.unsupported(problem)
