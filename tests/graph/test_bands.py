"""Depthwise convs of a user's network, alone and behind a split of the channels, by the depthwise kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import lowrank_cnn as lr
from lowrank_cnn.graph.bands import FusedBands, split_as_composite
from lowrank_cnn.graph.fuse import fuse, shared_copy
from lowrank_cnn.kernels import forced
from tests.kernels.helpers import DEVICE


class Split(nn.Module):
    """The token mixer of InceptionNeXt (Yu et al. 2023)."""

    def __init__(self, width: int, band: int = 5) -> None:
        super().__init__()
        part = width // 8
        self.square = nn.Conv2d(part, part, 3, padding=1, groups=part)
        self.across = nn.Conv2d(part, part, (1, band), padding=(0, band // 2), groups=part)
        self.down = nn.Conv2d(part, part, (band, 1), padding=(band // 2, 0), groups=part)
        self.sizes = (width - 3 * part, part, part, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, first, second, third = torch.split(x, self.sizes, dim=1)
        return torch.cat((passed, self.square(first), self.across(second), self.down(third)), dim=1)


class Swapped(Split):
    """It filters the parts in another order than it splits them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, first, second, third = torch.split(x, self.sizes, dim=1)
        return torch.cat((passed, self.square(second), self.across(first), self.down(third)), dim=1)


class Doubled(Split):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Halves(Split):
    """Equal parts by their size, not by a list of sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(x, x.shape[1] // 2, dim=1), dim=1) + self.zero(x)

    def zero(self, x: torch.Tensor) -> torch.Tensor:
        return 0 * (self.square(x[:, :2]).sum() + self.across(x[:, :2]).sum() + self.down(x[:, :2]).sum())


class Parts(Split):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(x, 2, 1), 1)


class Named(Split):
    """Its convs take their input by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, first, second, third = torch.split(x, self.sizes, dim=1)
        return torch.cat((passed, self.square(input=first), self.across(second), self.down(third)), dim=1)


def mixer(mix: nn.Module, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 2, 2), mix, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 1))


def plain(**options) -> nn.Conv2d:
    return nn.Conv2d(16, 16, 3, **{"groups": 16, "padding": 1, **options})


@pytest.mark.parametrize(
    ("mix", "layers"),
    [
        (Split(16), 1),
        (plain(stride=2, bias=False), 1),
        (nn.Sequential(plain(dilation=2, padding=2), plain()), 2),
        (Doubled(16), 3),  # its convs one by one
        (Swapped(16), 3),
        (Named(16), 3),
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
        assert sum(isinstance(part, FusedBands) for part in fused.modules()) == layers
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


@pytest.mark.parametrize("mix", [Halves(16), Parts(16)])
def test_other_splits_stay_as_they_are(mix: nn.Module):
    x = torch.randn(2, 16, 6, 5)
    assert torch.equal(shared_copy(nn.Sequential(mix), split_as_composite)(x), mix(x))


def test_an_input_of_other_channels_is_refused_by_torch_as_before():
    with forced("on"), pytest.raises(RuntimeError, match="channels"):
        fuse(nn.Sequential(plain()))(torch.randn(1, 12, 6, 6, device=DEVICE))


def test_without_kernels_the_result_is_that_of_torch_bit_by_bit():
    net, x = mixer(Split(16)).to(DEVICE).train(), torch.randn(2, 3, 14, 12, device=DEVICE)
    with forced("off"):
        assert torch.equal(fuse(net)(x), net(x))


def test_a_batch_norm_is_folded_into_a_split_that_became_a_composite():
    net, x = mixer(Split(16)).double(), torch.randn(2, 3, 14, 12, dtype=torch.float64)
    net(x)
    whole = shared_copy(net, split_as_composite).eval()
    assert isinstance(whole[1], lr.CompositeConv2d)
    assert torch.allclose(whole(x), net.eval()(x), atol=1e-12)
    merged = lr.merge(whole)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in merged.modules())
    assert torch.allclose(merged(x), net(x), atol=1e-12)
    for other in (Doubled(16), Swapped(16)):
        assert isinstance(shared_copy(mixer(other), split_as_composite)[1], Split)  # type: ignore[index]
