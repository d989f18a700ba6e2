"""Half precision computes in half, between inputs and outputs in float32."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.deploy.engines.precision import InHalf, at_precision
from lowrank_cnn.deploy.exporting import export, request_for, stored_of
from lowrank_cnn.system.errors import LowRankError


def test_a_network_in_half_takes_and_gives_float32(tiny):
    images = torch.randn(2, 3, 12, 12)
    half = InHalf(tiny)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    assert half(images).dtype == torch.float32
    torch.testing.assert_close(half(images), tiny(images), atol=0.01, rtol=0.01)
    assert tiny[0].bias.dtype == torch.float32


def test_half_precision_is_for_float32_networks(tiny, tmp_path):
    with pytest.raises(LowRankError, match="fp32 or fp16, not 'int8'; lr"):
        export(tiny, tmp_path / "net.onnx", input_size=(3, 12, 12), precision="int8")
    with pytest.raises(LowRankError, match="fp16 is for networks in float32"):
        export(tiny.half(), tmp_path / "net.onnx", input_size=(3, 12, 12), precision="fp16")


def test_linear_layers_can_stay_in_float32(tiny):
    images = torch.randn(2, 3, 12, 12)
    half = InHalf(tiny, linear_in_single=True)
    assert {str(parameter.dtype) for parameter in half.parameters()} == {"torch.float16", "torch.float32"}
    assert half.network[-1].layer.weight.dtype == torch.float32
    torch.testing.assert_close(half(images), tiny(images), atol=0.01, rtol=0.01)


def test_groups_have_constant_biases_in_half_precision_too(tiny):
    _, request = request_for(stored_of(tiny, (3, 12, 12)))
    network = at_precision(request, ".pte", "fp16").network
    called = [str(node.target) for node in torch.export.export(network, (torch.randn(1, 3, 12, 12),)).graph.nodes]
    assert called.count("aten.conv2d.default") == 3
    assert not any("split" in name for name in called)  # XNNPACK takes biases that are constants alone
