"""Depthwise convs of a user's network by the depthwise kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from lowrank_cnn.graph.fuse import FusedDepthwise, fuse
from lowrank_cnn.kernels import forced
from tests.kernels.helpers import DEVICE


def mixer(mix: nn.Module, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 2, 2), mix, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 1))


def plain(**options) -> nn.Conv2d:
    return nn.Conv2d(16, 16, 3, **{"groups": 16, "padding": 1, **options})


@pytest.mark.parametrize(
    ("mix", "layers"),
    [
        (plain(stride=2, bias=False), 1),
        (nn.Sequential(plain(dilation=2, padding=2), plain()), 2),
        (plain(groups=4), 0),
        (plain(padding_mode="reflect"), 0),
    ],
)
def test_depthwise_convs_are_found_and_train_as_before(mix: nn.Module, layers: int):
    torch.manual_seed(0)
    net = mixer(mix).to(DEVICE)
    x = torch.randn(2, 3, 10, 8, device=DEVICE)
    want = net.double()(x.double())
    exact = torch.autograd.grad(want.square().sum(), list(net.parameters()))
    net.float()
    with forced("on"):
        fused = fuse(net.train())
        assert sum(isinstance(part, FusedDepthwise) for part in fused.modules()) == layers
        got = fused(x)
        found = torch.autograd.grad(got.square().sum(), list(net.parameters()))
    close = 1e-4 if DEVICE == "cpu" else 2e-3  # dense convs of GPUs round their factors to TF32
    assert torch.allclose(got.double(), want, atol=close)
    for own, wanted in zip(found, exact, strict=True):
        assert torch.allclose(
            own.double(), wanted, atol=10 * close * wanted.abs().max().item() + close
        )  # a bias before a norm has none


class Penalised(nn.Module):
    """It reads the weight and the padding of its conv, besides calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) + self.mix.weight.square().sum() * self.mix.padding[0]  # type: ignore[index]


def test_a_forward_may_read_the_attributes_of_a_conv():
    net, x = Penalised().to(DEVICE), torch.randn(1, 16, 6, 5, device=DEVICE)
    with forced("on"):
        assert torch.allclose(fuse(net)(x), net(x), atol=1e-4)


def test_an_input_of_other_channels_is_refused_by_torch_as_before():
    with forced("on"), pytest.raises(RuntimeError, match="channels"):
        fuse(nn.Sequential(plain()))(torch.randn(1, 12, 6, 6, device=DEVICE))


def test_without_kernels_the_result_is_that_of_torch_bit_by_bit():
    net, x = mixer(plain()).to(DEVICE).train(), torch.randn(2, 3, 14, 12, device=DEVICE)
    with forced("off"):
        assert torch.equal(fuse(net)(x), net(x))
