"""The window kernel without a Hopper GPU: its own source, run over a small model of the hardware."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import WindowTile, pack_windows
from lowrank_cnn.kernels.problem import ConvTensors, describe
from lowrank_cnn.kernels.reference import composite_reference


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    module = hopper_model.emulate(monkeypatch, "window")
    module.launch_pad_channels = hopper_model.pad_channels
    return module


CASES = [
    pytest.param((2, 3, 12, 34), [(3, 1, 8), (1, 3, 8)], "floor", id="low-rank"),
    pytest.param((1, 3, 17, 21), [(3, 3, 32)], "floor", id="dense, odd size"),
    pytest.param((2, 4, 10, 6), [(3, 3, 32), (1, 1, 16)], "ceil", id="four channels, three tiles of filters"),
    pytest.param((3, 1, 4, 4), [(1, 3, 16)], "floor", id="one channel"),
]


def posed(hopper_model, size, groups, pool):
    torch.manual_seed(3)
    x = torch.randn(size)
    weights = [torch.randn(f, size[1], h, w) for h, w, f in groups]
    options = {"stride": (1, 1), "padding": [hopper_model.same(h, w) for h, w, _ in groups]}
    return x, weights, options, describe(x, weights, **options, relu=True, pool=pool)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("size", "groups", "pool"), CASES)
def test_the_kernel_and_its_ring_of_buffers_are_right(emulated, hopper_model, size, groups, pool, stages):
    x, weights, options, problem = posed(hopper_model, size, groups, pool)
    bias = torch.randn(problem.filters)
    packed = pack_windows(weights, problem, x.dtype)
    y = emulated.launch_window(problem, ConvTensors(x, packed, bias), WindowTile(stages, residents=1))
    exact = [x.double(), [w.double() for w in weights], bias.double()]
    expected = composite_reference(*exact, **options, relu=True, pool=pool)
    assert y.shape == expected.shape
    assert torch.linalg.norm(y - expected) < 1e-5 * torch.linalg.norm(expected)


def test_the_codes_name_the_winners(emulated, hopper_model):
    x, weights, options, problem = posed(hopper_model, (2, 3, 8, 10), [(3, 1, 8), (1, 3, 8)], "floor")
    codes = torch.full((2, *problem.result_size, 16), 77, dtype=torch.uint8)
    emulated.launch_window(problem, ConvTensors(x, pack_windows(weights, problem, x.dtype), None, codes=codes))
    before = composite_reference(x.double(), [w.double() for w in weights], None, **options)
    value, place = before.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).max(-1)
    assert torch.equal(codes.permute(0, 3, 1, 2).long(), torch.where(value > 0, place, 4))


def test_a_zero_is_cut(emulated, hopper_model):
    """The place of a winner in a value's lowest bits must not lift it above zero."""
    x, weights, _, problem = posed(hopper_model, (1, 3, 4, 4), [(3, 3, 16)], "floor")
    codes = torch.full((1, 2, 2, 16), 77, dtype=torch.uint8)
    packed = pack_windows(weights, problem, x.dtype)
    y = emulated.launch_window(problem, ConvTensors(torch.zeros_like(x), packed, torch.zeros(16), codes=codes))
    assert not y.any()
    assert (codes == 4).all()
