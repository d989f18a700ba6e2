"""Convs and pools of any padding read in LiteRT what they read in torch; PAD runs only where needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.litert_windows import AxisWindow
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.method.schemes import build_conv
from tests.deploy.engines.file_checks import assert_file_computes_the_same

pytest.importorskip("ai_edge_litert")


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


def test_even_padding_at_stride_1_is_no_operation(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, (1, 5), padding=(0, 2)))
    export(net.eval(), tmp_path / "net.tflite", input_size=(3, 8, 8))
    found = open_engine(tmp_path / "net.tflite").interpreter._get_ops_details()  # type: ignore[attr-defined]
    kinds = [each["op_name"] for each in found]
    assert kinds[:4] == ["TRANSPOSE", "CONV_2D", "CONV_2D", "TRANSPOSE"]


@pytest.mark.parametrize(
    ("window", "same", "needed"),
    [
        (AxisWindow(size=8, count=8, taps=3, step=1, dilation=1, before=1, after=1), True, 1),
        (AxisWindow(size=8, count=4, taps=3, step=2, dilation=1, before=1, after=1), False, 0),
        (AxisWindow(size=7, count=4, taps=3, step=2, dilation=1, before=1, after=1), True, 1),
        (AxisWindow(size=8, count=4, taps=1, step=2, dilation=1, before=0, after=0), True, -1),
        (AxisWindow(size=8, count=8, taps=3, step=1, dilation=2, before=2, after=2), True, 2),
        (AxisWindow(size=8, count=8, taps=2, step=1, dilation=1, before=1, after=0), False, 0),
    ],
)
def test_same_is_recognised(window: AxisWindow, same: bool, needed: int):
    assert window.is_same == same
    assert window.needed == needed


def test_averages_divide_as_torch_does():
    window = AxisWindow(size=6, count=4, taps=3, step=2, dilation=1, before=1, after=1)
    ones = torch.ones(1, 1, 6, 1)
    for padding in (True, False):
        how = {"ceil_mode": True, "count_include_pad": padding}
        means = F.avg_pool2d(ones, (3, 1), (2, 1), (1, 0), **how).flatten()
        sums = F.avg_pool2d(ones, (3, 1), (2, 1), (1, 0), ceil_mode=True, divisor_override=1).flatten()
        assert torch.tensor(window.divisors(padding=padding)).tolist() == (sums / means).round().tolist()


def test_convs_of_other_dimensions_are_refused(tmp_path: Path):
    with pytest.raises(LowRankError, match="a conv of 1 dimensions"):
        export(nn.Conv1d(3, 4, 3), tmp_path / "net.tflite", example_input=torch.randn(2, 3, 9))
