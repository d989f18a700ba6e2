"""The Hopper kernel without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

from dataclasses import replace

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


STAYING = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], (1, 1), 2, id="odd size, ragged groups"),
    pytest.param((3, 40, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 32)], (1, 1), 3, id="groups of several runs"),
    pytest.param((2, 40, 7, 5), [(1, 1, 48)], (1, 1), 4, id="pointwise"),
    pytest.param((4, 32, 12, 20), [(3, 1, 16), (1, 3, 16)], (2, 2), 2, id="stride 2"),
]


@pytest.mark.parametrize(("size", "groups", "stride", "boxes"), STAYING)
def test_weights_that_stay_are_fetched_once(emulated, hopper_model, size, groups, stride, boxes):
    x, weights, bias, options, problem = posed(hopper_model, size, groups, stride, "relu")
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=boxes, slabs=0, parts=1, residents=1)
    poison(emulated)
    y = emulated.launch_hopper(problem, x, pack_rows(weights, x.dtype), bias, tile)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)
    ring = emulated.machine.fetched
    emulated.machine.fetched = 0
    emulated.launch_hopper(problem, x, pack_rows(weights, x.dtype), bias, replace(tile, boxes=2, slabs=2))
    assert ring < emulated.machine.fetched


EPILOGUES = [
    pytest.param((2, 16, 9, 7), [(3, 1, 16), (1, 3, 24)], (1, 1), "relu", 1, id="one part"),
    pytest.param((1, 24, 6, 6), [(3, 3, 32)], (1, 1), "silu", 2, id="two parts"),
    pytest.param((3, 16, 5, 5), [(1, 1, 32)], (1, 1), "leaky_relu:0.2", 2, id="pointwise"),
    pytest.param((2, 16, 8, 12), [(3, 1, 16), (1, 3, 16)], (2, 2), "gelu", 1, id="stride 2"),
]


@pytest.mark.parametrize(("size", "groups", "stride", "activation", "parts"), EPILOGUES)
def test_a_residual_comes_through_the_memory_of_the_results(
    emulated, hopper_model, size, groups, stride, activation, parts
):
    x, weights, bias, options, problem = posed(hopper_model, size, groups, stride, activation, residual=True)
    residual = torch.randn(size[0], problem.filters, *problem.result_size)
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=2, slabs=2, parts=parts)
    poison(emulated)
    y = emulated.launch_hopper(problem, x, pack_rows(weights, x.dtype), bias, tile, residual=residual)
    exact = composite_reference(
        x.double(), [w.double() for w in weights], bias.double(), residual=residual.double(), **options
    )
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)


STRIDED = [
    pytest.param((2, 16, 8, 6), [(3, 1, 16), (1, 3, 24)], (2, 2), 2, 2, id="low-rank, ragged groups"),
    pytest.param((1, 48, 12, 8), [(3, 3, 32)], (2, 2), 3, 3, id="dense"),
    pytest.param((3, 32, 6, 10), [(1, 1, 16)], (2, 2), 4, 4, id="pointwise"),
    pytest.param((1, 16, 8, 7), [(7, 1, 16), (1, 7, 16)], (2, 1), 2, 2, id="rows only, seven taps"),
]


@pytest.mark.parametrize(("size", "groups", "stride", "boxes", "slabs"), STRIDED)
def test_a_stride_reads_the_image_in_place(emulated, hopper_model, size, groups, stride, boxes, slabs):
    x, weights, bias, options, problem = posed(hopper_model, size, groups, stride, "hardswish")
    assert unsupported(replace(problem, dtype=torch.bfloat16)) is None
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=boxes, slabs=slabs, parts=1)
    poison(emulated)
    y = emulated.launch_hopper(problem, x, pack_rows(weights, x.dtype), bias, tile)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)


def posed(hopper_model, size, groups, stride, activation, **more):
    torch.manual_seed(4)
    x, weights = torch.randn(size), [torch.randn(f, size[1], h, w) for h, w, f in groups]
    padding = [hopper_model.same(h, w) for h, w, _ in groups]
    options = {"stride": stride, "padding": padding, "activation": activation}
    return x, weights, torch.randn(sum(f for *_, f in groups)), options, describe(x, weights, **options, **more)


def poison(emulated):
    """Memory for results comes full of NaN, so that what is never written shows."""
    emulated.empty_result = lambda problem, x: torch.full(
        (problem.batch, *problem.result_size, problem.filters), torch.nan
    ).permute(0, 3, 1, 2)
