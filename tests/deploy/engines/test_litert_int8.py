"""int8 files for LiteRT are as near the network as others, and leave layers in float where asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.method.schemes import build_conv

pytest.importorskip("onnx_tflite")


class Gated(nn.Module):
    """Groups of channels, strips, a residual, a gate, pools of both kinds and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.grouped, self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.strips, self.gate = build_conv(8, 8, 3, "lr"), nn.Conv2d(8, 8, 1)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(8 * 9, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        x = torch.relu(self.strips(x) + self.deep(self.grouped(x)))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.head(self.pool(x).flatten(1))


def test_int8_is_near_the_network_in_one_piece(tmp_path: Path):
    torch.manual_seed(0)
    net, images = Gated().eval(), torch.randn(24, 3, 24, 24)
    quantize(net, images, tmp_path / "net.tflite")
    given = torch.from_numpy(open_engine(tmp_path / "net.tflite")(images.numpy())["output"])
    expected = net(images).detach()
    assert 0 < (given - expected).norm() / expected.norm() < 0.03
    details = open_engine(tmp_path / "net.tflite").interpreter._get_ops_details()  # type: ignore[attr-defined]
    kinds = [each["op_name"] for each in details]
    assert (
        kinds.count("QUANTIZE") == kinds.count("DEQUANTIZE") == 2
    )  # about the network, and about the average pool


def test_the_variance_of_quiet_channels_is_not_lost(tmp_path: Path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-1.3, 0, 8).view(-1, 1, 1, 1))  # type: ignore[operator]
    images = torch.randn(24, 4, 8, 8)
    quantize(net, images, tmp_path / "net.tflite")
    given = torch.from_numpy(open_engine(tmp_path / "net.tflite")(images.numpy())["output"])
    expected = net(images).detach()
    assert (given - expected).norm() / expected.norm() < 0.2


def test_layers_and_ranges_that_are_given_are_kept(tmp_path: Path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)).eval()
    with torch.no_grad():
        net[2].weight[:, 0] = 1e5  # type: ignore[index]
        net[0].bias[0] = -1e4  # type: ignore[index]
    found = quantize(net, torch.randn(8, 3, 8, 8), tmp_path / "net.tflite")
    assert found.in_float == ("2",)
    details = open_engine(found.path).interpreter.get_tensor_details()  # type: ignore[attr-defined]
    kinds = {each["dtype"] for each in details if list(each["shape"]) == [4, 3, 3, 4]}
    assert kinds == {np.float32}


def test_a_dead_channel_keeps_its_bias(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 0, 7.0  # type: ignore[index]
    images = torch.randn(8, 3, 6, 6)
    found = quantize(net, images, tmp_path / "net.tflite")
    assert found.in_float == ()
    given = open_engine(found.path)(images.numpy())["output"]
    np.testing.assert_allclose(given[:, 1], 7.0, rtol=0.02)
