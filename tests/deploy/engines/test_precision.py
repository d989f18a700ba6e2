"""Half precision computes in half, between inputs and outputs in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.request import InHalf, at_precision
from lowrank_cnn.deploy.export import export, request_for, stored_of
from lowrank_cnn.method.convert import convert


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
    half = InHalf(tiny, lambda part: type(part) is nn.Linear)
    assert {str(parameter.dtype) for parameter in half.parameters()} == {"torch.float16", "torch.float32"}
    assert half.network.get_submodule("7.layer").weight.dtype == torch.float32
    torch.testing.assert_close(half(images), tiny(images), atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("groups", "filters"), [(2, 8), (8, 8), (8, 16)])
def test_convs_with_groups_of_channels_are_right_in_half_precision(tmp_path, groups, filters):
    conv = nn.Conv2d(8, filters, 3, padding=1, groups=groups)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), conv, nn.Flatten(), nn.LazyLinear(5)).eval()
    net(torch.randn(1, 3, 12, 12))
    found = export(net, tmp_path / "net.onnx", input_size=(3, 12, 12), precision="fp16")
    assert found.error is not None
    assert found.error < 0.02


def test_composites_with_groups_of_channels_are_right_in_half_precision(tmp_path):
    torch.manual_seed(0)
    conv = nn.Conv2d(24, 48, 3, padding=1, groups=3)
    net = convert(nn.Sequential(nn.Conv2d(3, 24, 1), nn.ReLU(), conv), "lr-join", allow_costlier=True).eval()
    found = export(net, tmp_path / "net.onnx", input_size=(3, 12, 12), precision="fp16")
    assert found.error is not None
    assert found.error < 0.01


def test_groups_have_constant_biases_in_half_precision_too(tiny):
    _, request = request_for(stored_of(tiny, (3, 12, 12)))
    network = at_precision(request, ".pte", "fp16").network
    called = [str(node.target) for node in torch.export.export(network, (torch.randn(1, 3, 12, 12),)).graph.nodes]
    assert called.count("aten.conv2d.default") == 3
    assert not any("split" in name for name in called)  # XNNPACK takes biases that are constants alone


def test_what_torch_lacks_in_half_precision_is_refused_in_a_sentence(tmp_path):
    """`lowrank plan --engine auto` tries every precision, and goes on with the next."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(3)).eval()
    for suffix in (".onnx", ".pt2", ".ts"):
        with pytest.raises(LowRankError, match="not implemented for 'Half'"):
            export(net, tmp_path / f"net{suffix}", input_size=(3, 8, 8), precision="fp16")


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y if y.mean() > 0 else -y


@pytest.mark.parametrize("suffix", ["onnx", "ts"])
def test_a_refusal_names_the_network_of_the_user(tmp_path, suffix: str):
    with pytest.raises(LowRankError, match="cannot trace Reads"):
        export(Reads(), tmp_path / f"net.{suffix}", input_size=(3, 8, 8), precision="fp16")


class Large(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1e6


def test_an_overflow_in_half_precision_is_called_that(tmp_path):
    with pytest.raises(LowRankError, match="by inf, since its values overflow in half precision: nothing was"):
        export(Large(3, 4, 3), tmp_path / "net.ts", input_size=(3, 8, 8), precision="fp16")
