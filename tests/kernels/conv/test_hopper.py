"""The Hopper kernel without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, filters_per_tile
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.problem import ConvTensors, describe
from lowrank_cnn.kernels.reference import composite_reference


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    return hopper_model.emulate(monkeypatch)


CASES = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], None, 1, 2, 3, id="odd size, ragged groups"),
    pytest.param((3, 16, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 16)], "floor", 2, 2, 4, id="three groups, pool"),
    pytest.param((1, 32, 11, 6), [(5, 1, 16), (1, 5, 16)], "ceil", 1, 3, 5, id="five taps, clipped pool"),
    pytest.param((2, 40, 7, 5), [(1, 1, 32)], None, 2, 4, 4, id="pointwise"),
    pytest.param((1, 16, 5, 9), [(3, 3, 32)], None, 1, 2, 2, id="dense"),
]


@pytest.mark.parametrize(("size", "groups", "pool", "parts", "boxes", "slabs"), CASES)
def test_the_kernel_and_its_ring_of_buffers_are_right(
    emulated, hopper_model, size, groups, pool, parts, boxes, slabs
):
    torch.manual_seed(1)
    x = torch.randn(size)
    weights = [torch.randn(f, size[1], h, w) for h, w, f in groups]
    bias = torch.randn(sum(f for _, _, f in groups))
    options = {
        "stride": (1, 1),
        "padding": [hopper_model.same(h, w) for h, w, _ in groups],
        "relu": True,
        "pool": pool,
    }
    problem = describe(x, weights, **options)
    tile = HopperTile(
        pixels=32, filters=filters_per_tile(problem, 16), depth=16, boxes=boxes, slabs=slabs, parts=parts
    )
    emulated.empty_result = lambda problem, x: torch.full(
        (size[0], *problem.result_size, problem.filters), torch.nan
    ).permute(0, 3, 1, 2)
    packed = pack_rows(weights, x.dtype)
    y = emulated.launch_hopper(problem, ConvTensors(x, packed, bias), tile)
    expected = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - expected) < 1e-5 * torch.linalg.norm(expected)
