"""The Hopper kernel without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, filters_per_tile, unsupported
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.problem import describe
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
    y = emulated.launch_hopper(problem, x, packed, bias, tile)
    expected = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - expected) < 1e-5 * torch.linalg.norm(expected)


@pytest.mark.parametrize(
    ("filters", "pool", "taken"), [(24, None, True), (24, "floor", False), (32, "floor", True), (20, None, False)]
)
def test_groups_begin_where_boxes_may(hopper_model, filters, pool, taken):
    """Two groups of 20 filters are five whole boxes of 8, but the second begins within one."""
    x, weights = torch.empty(1, 16, 8, 8, dtype=torch.bfloat16), [torch.empty(filters, 16, 3, 1)] * 2
    padding = [hopper_model.same(3, 1)] * 2
    problem = describe(x, weights, stride=(1, 1), padding=padding, relu=True, pool=pool)
    assert (unsupported(problem) is None) is taken


@pytest.mark.parametrize("pool", ["floor", "ceil"])
def test_the_codes_of_a_fused_pool_name_the_winners(emulated, hopper_model, pool):
    torch.manual_seed(2)
    x, weights = torch.randn(1, 16, 9, 7), [torch.randn(16, 16, 3, 1), torch.randn(16, 16, 1, 3)]
    options = {"stride": (1, 1), "padding": [hopper_model.same(3, 1), hopper_model.same(1, 3)]}
    problem = describe(x, weights, **options, relu=True, pool=pool)
    codes = torch.full((1, *problem.result_size, 32), 77, dtype=torch.uint8)
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=2, slabs=3, parts=1)
    emulated.launch_hopper(problem, x, pack_rows(weights, x.dtype), None, tile, codes)
    before = composite_reference(x.double(), [w.double() for w in weights], None, **options)
    height, width = problem.result_size
    whole = torch.nn.functional.pad(before, (0, 1, 0, 1), value=-torch.inf)[:, :, : 2 * height, : 2 * width]
    value, place = whole.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).max(-1)
    assert torch.equal(codes.permute(0, 3, 1, 2).long(), torch.where(value > 0, place, 4))
