"""The overlap kernel without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.overlap_plan import OverlapTile, pack_overlap, unsupported
from lowrank_cnn.kernels.problem import ConvTensors, describe
from lowrank_cnn.kernels.reference import composite_reference

LOW_RANK = [(7, 1, 16), (1, 7, 16)]


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    module = hopper_model.emulate(monkeypatch, "window", "overlap")
    module.launch_pad_channels = hopper_model.pad_channels
    module.empty_result = lambda problem, x: torch.full(
        (problem.batch, *problem.result_size, problem.filters), torch.nan
    ).permute(0, 3, 1, 2)
    return module


def posed(hopper_model, size, groups, *, stride=(2, 2), padding=None, **options):
    torch.manual_seed(5)
    x, weights = torch.randn(size), [torch.randn(f, size[1], h, w) for h, w, f in groups]
    options |= {"stride": stride, "padding": padding or [hopper_model.same(h, w) for h, w, _ in groups]}
    return x, weights, torch.randn(sum(f for *_, f in groups)), options, describe(x, weights, **options)


CASES = [
    pytest.param((2, 3, 22, 30), LOW_RANK, {"pool": "3x3/2", "activation": "relu"}, id="low-rank stem"),
    pytest.param((1, 3, 30, 22), [(7, 7, 32)], {"pool": "3x3/2", "activation": "relu"}, id="dense stem"),
    pytest.param((1, 3, 21, 27), LOW_RANK, {"pool": "3x3/2"}, id="odd size, no activation"),
    pytest.param((2, 3, 12, 250), LOW_RANK, {"activation": "silu"}, id="several tiles of columns, no pool"),
    pytest.param((1, 3, 9, 262), [(3, 3, 48)], {"pool": "3x3/2"}, id="several tiles, pooled, three of filters"),
    pytest.param((3, 4, 10, 9), [(4, 4, 16)], {"padding": [((1, 1), (1, 1))]}, id="four channels, even taps"),
    pytest.param((1, 1, 8, 8), [(1, 7, 16)], {"activation": "relu"}, id="one row of taps, grey"),
    pytest.param((1, 3, 16, 16), [(3, 3, 16)], {"stride": (1, 2), "pool": "3x3/2"}, id="rows of stride 1"),
    pytest.param((1, 3, 24, 24), [(11, 11, 16)], {"padding": [((2, 2), (2, 2))]}, id="eleven taps"),
    pytest.param((1, 3, 8, 8), [(2, 2, 16)], {"padding": [((0, 0), (0, 0))]}, id="patches"),
]


@pytest.mark.parametrize("tile", [OverlapTile(2, 2, 1), OverlapTile(4, 1, 1)])
@pytest.mark.parametrize(("size", "groups", "options"), CASES)
def test_the_kernel_is_right(emulated, hopper_model, size, groups, options, tile):
    x, weights, bias, options, problem = posed(hopper_model, size, groups, **options)
    assert unsupported(replace(problem, dtype=torch.bfloat16)) is None
    y = emulated.launch_overlap(problem, ConvTensors(x, pack_overlap(weights, problem, x.dtype), bias), tile)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert y.shape == exact.shape
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)
