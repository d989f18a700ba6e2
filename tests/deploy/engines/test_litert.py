"""The writer of LiteRT files: every operation computes the same, in float and in int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.compare import difference
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.method.schemes import build_conv
from tests.deploy.engines.conftest import Calls

pytest.importorskip("onnx_tflite")

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": lambda x: F.relu6(4 * x),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "power": lambda x: (x.abs() + 1) ** 1.5,
    "arithmetic": lambda x: (3 - x) / 2 * torch.exp(-x.abs()).sqrt(),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "extremes": lambda x: torch.maximum(x, torch.minimum(x.flip(()), -x)),
}


def assert_file_computes_the_same(network: nn.Module, image: Tensor, path: Path, most: float = 1e-6, **options):
    """Export a network that gives named outputs, and compare each of them with float64."""
    export(network, path, example_input=image, dynamic=(), **options)
    given = open_engine(path)(image.numpy())
    with torch.no_grad():
        expected = network.double()(image.double())
    errors = {name: difference(torch.from_numpy(given[name]).double(), right) for name, right in expected.items()}
    assert max(errors.values()) < most, errors


OPERATIONS = {
    "flatten": lambda x: x.flatten(1),
    "to_last": lambda x: x.permute(0, 2, 3, 1),
    "turned": lambda x: x.transpose(2, 3),
    "shuffle": lambda x: x.view(1, 2, 2, 6, 5).transpose(1, 2).flatten(1, 2),
    "concat": lambda x: torch.cat([x, x.relu()], 1),
    "rows": lambda x: torch.cat([x, x.relu()], 2),
    "part": lambda x: x[:, 1:, ::2],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "pad": lambda x: F.pad(x, (-1, 2, 1, 0)),
    "pad_value": lambda x: F.pad(x, (1, 2, 1, 0), value=2.0),
    "reflect": lambda x: F.pad(x, (3, 1, 0, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (3, 1, 0, 6), mode="replicate"),
    "circular": lambda x: F.pad(x, (3, 1, 0, 4), mode="circular"),
    "group_norm": lambda x: F.group_norm(x - 3, 2),
    "one_group": lambda x: F.group_norm(x, 1).relu(),
    "instance_norm": lambda x: F.instance_norm(x, eps=0.1),
    "softmax": lambda x: x.softmax(1),
    "softmax_last": lambda x: x.flatten(1).softmax(-1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear"),
    "corners": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear", align_corners=True),
    "mean": lambda x: x.mean((2, 3)),
    "mean_map": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean_channels": lambda x: x.mean(1),
    "largest": lambda x: x.amax((2, 3)),
    "product": lambda x: x @ x.transpose(2, 3),
}


class Operations(nn.Module):
    """Every function of both tables, on a conv's maps (channels last there) or on the image itself, and layers."""

    def __init__(self, *, behind_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1) if behind_conv else nn.Identity()
        self.groups, self.alone = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        for norm in (self.groups, self.alone):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.linear, self.rows = nn.Linear(120, 7), nn.Linear(5, 3, bias=False)
        self.slopes, self.norm = nn.PReLU(4), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.conv(image)
        found = {name: made(x) for name, made in (ACTIVATIONS | OPERATIONS).items()}
        found |= {"groups": self.groups(x), "alone": self.alone(x)}
        found |= {"prelu": self.slopes(x), "norm": self.norm(x + 1).relu()}
        return {**found, "linear": self.linear(x.flatten(1)).relu(), "linear_rows": self.rows(x)}


@pytest.mark.parametrize("behind_conv", [False, True])
def test_operations(behind_conv: bool, tmp_path: Path):
    torch.manual_seed(0)
    net, image = Operations(behind_conv=behind_conv).eval(), torch.randn(1, 4, 6, 5)
    assert_file_computes_the_same(net, image, tmp_path / "net.tflite")


class Windows(nn.Module):
    """Convs and pools by name, each on the same maps."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {name: part(image) for name, part in self.parts.items()}


def convs() -> dict[str, nn.Module]:
    return {
        "same": nn.Conv2d(4, 6, 3, padding=1),
        "strip": nn.Conv2d(4, 6, (1, 3), padding=(0, 1), bias=False),
        "stride": nn.Conv2d(4, 6, 3, 2, 1),
        "uneven": nn.Conv2d(4, 6, (5, 3), (2, 3), (2, 0)),
        "dilated": nn.Conv2d(4, 6, 3, padding=2, dilation=2),
        "even": nn.Conv2d(4, 6, (4, 2), padding="same"),
        "depthwise": nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.ReLU6()),
        "multiplied": nn.Conv2d(4, 12, 3, 2, 1, groups=4),
        "grouped": nn.Conv2d(4, 6, 3, padding=1, groups=2),
        "composite": build_conv(4, 8, 3, "lr", stride=2),
        "composite5": nn.Sequential(build_conv(4, 8, 5, "mixture", stride=2), nn.ReLU()),
    }


def pools() -> dict[str, nn.Module]:
    return {
        "max": nn.MaxPool2d(2),
        "max_padded": nn.MaxPool2d(3, 2, 1),
        "max_behind_relu": nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        "max_up": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "average": nn.AvgPool2d(2),
        "average_padded": nn.AvgPool2d(3, 2, 1),
        "average_of_values": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        "average_up": nn.AvgPool2d(3, 2, ceil_mode=True),
        "average_up_padded": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        "average_up_of_values": nn.Sequential(
            nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.ReLU()
        ),
        "adaptive": nn.AdaptiveAvgPool2d((3, 2)),
        "largest": nn.AdaptiveMaxPool2d(1),
        "response": nn.LocalResponseNorm(3),
    }


@pytest.mark.parametrize(("made", "size"), [(convs, (11, 8)), (convs, (12, 9)), (pools, (12, 8))])
def test_windows(made, size: tuple[int, int], tmp_path: Path):
    torch.manual_seed(0)
    net, image = Windows(made()).eval(), torch.randn(1, 4, *size) - 0.5
    assert_file_computes_the_same(net, image, tmp_path / "net.tflite")


def decoders() -> dict[str, nn.Module]:
    return {
        "twice": nn.ConvTranspose2d(4, 6, 2, 2),
        "even": nn.ConvTranspose2d(4, 6, 4, 2, 1, bias=False),
        "odd": nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
        "beyond": nn.ConvTranspose2d(4, 6, 3, 2, 0, output_padding=1),
        "far_beyond": nn.ConvTranspose2d(4, 6, 1, 3, 0, output_padding=2),
        "uneven": nn.ConvTranspose2d(4, 6, (5, 2), (3, 1), (2, 0), output_padding=(2, 0)),
        "dilated": nn.ConvTranspose2d(4, 6, 3, 2, 2, dilation=(2, 3), output_padding=1),
        "grouped": nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=2), nn.ReLU()),
        "depthwise": nn.ConvTranspose2d(4, 8, 3, 2, 1, groups=4),
        "normalised": nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU()),
    }


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-6), ("fp16", 5e-3)])
def test_transposed_convs(tmp_path: Path, precision: str, most: float):
    torch.manual_seed(0)
    net, image = Windows(decoders()).eval(), torch.randn(1, 4, 7, 6)
    assert_file_computes_the_same(net, image, tmp_path / "net.tflite", most, precision=precision)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.softmax(2), "Softmax .* another axis"),
        (lambda x: F.interpolate(x, size=(9, 7), mode="bicubic"), "Resize .* interpolates by cubic"),
        (lambda x: x.cumsum(1), "CumSum .* is not supported"),
        (lambda x: F.elu(x, 0.5), "Elu .* another alpha than 1"),
        (nn.Conv1d(3, 2, 2), "Conv .* is 1-dimensional, and only 2 dimensions"),
        (nn.ConvTranspose1d(3, 2, 2), "ConvTranspose .* is 1-dimensional, and only 2 dimensions"),
    ],
)
def test_others_are_refused_by_name(function, words: str, tmp_path: Path):
    net = nn.Sequential(nn.Flatten(2), function) if isinstance(function, nn.Module) else Calls(function)
    with pytest.raises(LowRankError, match=f"cannot be written for LiteRT: {words}"):
        export(net, tmp_path / "net.tflite", input_size=(3, 4, 4))


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
