"""Depthwise composites by the kernels, against torch's convs in float64: results, gradients, operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import lowrank_cnn as lr
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.depthwise import ops
from tests.kernels.helpers import DEVICE, GPU, assert_well_formed

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(), (1, 1), (3, 3), (1, 5), (5, 1), (1, 11), (11, 1), (7, 7), (2, 4)]


def drawn_layer(data: st.DataObject) -> tuple[lr.CompositeConv2d, torch.Tensor]:
    """A layer of one to four bands of any shapes, and an input for it."""
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    filters = [data.draw(st.sampled_from([1, 3, 12])) for _ in shapes]
    groups = [lr.FilterGroup(*shape, n, depthwise=True) for shape, n in zip(shapes, filters, strict=True)]
    height, width = data.draw(st.tuples(st.integers(11, 13), st.integers(11, 13)))
    options: dict[str, Any] = {
        "stride": data.draw(st.sampled_from([1, 2, (1, 2), 3])),
        "padding": data.draw(st.sampled_from(["same", "valid", 2, ((0, 3), (4, 1))])),
        "bias": data.draw(st.booleans()),
    }
    options["dilation"] = data.draw(st.sampled_from([1, 2, (1, 3)])) if options["padding"] == "same" else 1
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layer = lr.CompositeConv2d(sum(filters), groups, **options).to(DEVICE)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer, torch.randn(data.draw(st.integers(1, 2)), sum(filters), height, width, device=DEVICE)


def gradients(layer: lr.CompositeConv2d, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(y.dtype))]


@given(st.data(), st.sampled_from(list(ROUNDING)))
@settings(max_examples=2)
def test_any_bands_equal_torch_in_float64_with_their_gradients(data: st.DataObject, dtype: torch.dtype):
    layer, x = drawn_layer(data)
    layer, x = layer.to(dtype), x.to(dtype)
    upstream = torch.randn(layer(x).shape, device=DEVICE).to(dtype)
    with forced("on"):
        assert layer.explain(x).startswith("fused")
        found = gradients(layer, x, upstream)
    with forced("off"):
        wanted = gradients(layer.double(), x.double(), upstream.double())
    for own, exact in zip(found, wanted, strict=True):
        assert own.dtype == dtype
        assert own.shape == exact.shape
        assert (own - exact).norm() <= ROUNDING[dtype] * exact.norm() + 1e-12


@pytest.mark.skipif(not GPU, reason="programs run one after the other without a GPU")
def test_gradients_are_the_same_bit_by_bit_each_time():
    groups = [lr.FilterGroup(3, 3, 40, depthwise=True), lr.FilterGroup(11, 1, 24, depthwise=True)]
    layer, x = lr.CompositeConv2d(64, groups).to(DEVICE), torch.randn(32, 64, 56, 56, device=DEVICE)
    first, *others = (gradients(layer, x, x) for _ in range(5))
    assert all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))


def test_filters_may_lie_in_memory_as_they_like():
    x, filters = torch.randn(2, 4, 6, 7, device=DEVICE), torch.randn(4, 1, 5, 3, device=DEVICE).transpose(2, 3)
    layer = ([4, 3, 5, 1, 2], [1, 1], [1, 1])
    *_, found = ops.depthwise_conv2d_backward(x, x, [filters], *layer, False, False)
    exact = filters.double().requires_grad_()
    y = torch.conv2d(x.double(), exact, padding=(1, 2), groups=4)
    assert torch.allclose(found.double(), torch.autograd.grad(y, exact, x.double())[0], atol=1e-4)


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu"])
def test_scale_activation_and_residual_follow_in_the_same_pass(activation: str):
    x, scale, bias = (torch.randn(size, device=DEVICE) for size in ((2, 9, 6, 7), 9, 9))
    filters = [torch.randn(4, 1, 3, 3, device=DEVICE)]
    layer = ([5, 0, 0, 0, 0, 4, 3, 3, 1, 1], [1, 1], [1, 1], [6, 7])
    y = ops.depthwise_conv2d(x, filters, bias, *layer, scale, x, activation, 0.0)
    conv = torch.conv2d(x[:, 5:].double(), filters[0].double(), padding=1, groups=4)
    z = torch.cat([x[:, :5].double(), conv], 1) * scale[:, None, None] + bias[:, None, None]
    act = {"": lambda z: z, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    assert torch.allclose(y.double(), act[activation](z) + x, atol=1e-5)


def test_the_operators_are_well_formed():
    x, bias = torch.randn(2, 9, 6, 7, device=DEVICE, requires_grad=True), torch.randn(9, device=DEVICE)
    filters = [torch.randn(4, 1, 3, 3, device=DEVICE, requires_grad=True)]
    layer = ([5, 0, 0, 0, 0, 4, 3, 3, 1, 1], [1, 1], [1, 1])
    assert_well_formed(
        ops.depthwise_conv2d, (x, filters, bias, *layer, [6, 7], None, None, "", 0.0), gradients=True
    )
    assert_well_formed(
        ops.depthwise_conv2d_backward,
        (x.detach(), x.detach(), [filters[0].detach()], *layer, True, True),
        gradients=False,
    )


def test_they_run_compiled_and_under_autocast_and_count_their_operations():
    layer = lr.CompositeConv2d(9, [lr.FilterGroup(5, depthwise=True), lr.FilterGroup(3, 3, 4, depthwise=True)])
    layer, x = layer.to(DEVICE), torch.randn(2, 9, 6, 7, device=DEVICE)
    with forced("on"):
        whole = layer(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), whole, atol=1e-6)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counted:
            layer(x)
    assert counted.get_total_flops() == 2 * 2 * 6 * 7 * 4 * 9


def test_filters_of_too_many_taps_stay_with_torch():
    layer = lr.CompositeConv2d(16, [lr.FilterGroup(13, 13, 16, depthwise=True)]).to(DEVICE)
    x = torch.randn(1, 16, 14, 14, device=DEVICE)
    with forced("on"):
        assert layer.explain(x) == "torch (filters of more than 81 taps)"
        assert torch.allclose(layer(x), layer.dense_view()(x), atol=1e-5)
