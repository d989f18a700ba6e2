"""The epilogue of the Hopper kernel, over a small model of the hardware: codes of a pool, and residuals."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import HopperTile
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.problem import ConvTensors, describe
from lowrank_cnn.kernels.reference import composite_reference


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    return hopper_model.emulate(monkeypatch)


@pytest.mark.parametrize("pool", ["floor", "ceil"])
def test_the_codes_of_a_fused_pool_name_the_winners(emulated, hopper_model, pool):
    torch.manual_seed(2)
    x, weights = torch.randn(1, 16, 9, 7), [torch.randn(16, 16, 3, 1), torch.randn(16, 16, 1, 3)]
    options = {"stride": (1, 1), "padding": [hopper_model.same(3, 1), hopper_model.same(1, 3)]}
    problem = describe(x, weights, **options, relu=True, pool=pool)
    codes = torch.full((1, *problem.result_size, 32), 77, dtype=torch.uint8)
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=2, slabs=3, parts=1)
    emulated.launch_hopper(problem, ConvTensors(x, pack_rows(weights, x.dtype), None, codes=codes), tile)
    before = composite_reference(x.double(), [w.double() for w in weights], None, **options)
    height, width = problem.result_size
    whole = torch.nn.functional.pad(before, (0, 1, 0, 1), value=-torch.inf)[:, :, : 2 * height, : 2 * width]
    value, place = whole.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).max(-1)
    assert torch.equal(codes.permute(0, 3, 1, 2).long(), torch.where(value > 0, place, 4))


EPILOGUES = [
    pytest.param((2, 16, 9, 7), [(3, 1, 16), (1, 3, 24)], (1, 1), "relu", 1, id="one part"),
    pytest.param((1, 24, 6, 6), [(3, 3, 32)], (1, 1), "silu", 2, id="two parts"),
    pytest.param((3, 16, 5, 5), [(1, 1, 32)], (1, 1), "leaky_relu:0.2", 2, id="pointwise"),
    pytest.param((2, 16, 8, 12), [(3, 1, 16), (1, 3, 16)], (2, 2), "gelu", 1, id="stride 2"),
]


@pytest.mark.parametrize("add_last", [False, True])
@pytest.mark.parametrize(("size", "groups", "stride", "activation", "parts"), EPILOGUES)
def test_a_residual_comes_through_the_memory_of_the_results(
    emulated, hopper_model, size, groups, stride, activation, parts, add_last
):
    order = {"residual": True, "add_last": add_last}
    x, weights, bias, options, problem = hopper_model.posed(size, groups, stride, activation, **order)
    residual = torch.randn(size[0], problem.filters, *problem.result_size)
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=2, slabs=2, parts=parts)
    hopper_model.poison(emulated)
    y = emulated.launch_hopper(problem, ConvTensors(x, pack_rows(weights, x.dtype), bias, residual=residual), tile)
    numbers = (x.double(), [w.double() for w in weights], bias.double())
    exact = composite_reference(*numbers, residual=residual.double(), add_last=add_last, **options)
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)
