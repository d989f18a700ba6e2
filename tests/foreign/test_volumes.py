"""Medical networks of monai and video networks of torchvision: converted, counted, thinned, merged, exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from benchmarks.foreign_networks import networks

VOLUMES = ("UNet 3-D", "SegResNet 3-D", "HighResNet 3-D", "ResNet 3-D")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18")
SCHEMES = ("lr", "2+1")


def medical(name: str) -> tuple[nn.Module, Tensor]:
    pytest.importorskip("monai")
    found = next(network for network in networks() if network.name == f"monai:{name}")
    torch.manual_seed(0)
    return found.build(), found.inputs()[0]


def video(name: str) -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision.models.video")
    torch.manual_seed(0)
    return getattr(models, name)(num_classes=5), torch.randn(1, 3, 4, 32, 32)


def settled(network: nn.Module, x: Tensor) -> nn.Module:
    """With statistics of its own in every batch norm."""
    with torch.no_grad():
        network.train()(torch.cat([x, -x]))
    return network.eval()


def assert_same(ours: Any, right: Any) -> None:
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))


NETWORKS = [pytest.param(medical, name, id=name) for name in VOLUMES]
NETWORKS += [pytest.param(video, name, id=name) for name in VIDEO]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("make", "name"), NETWORKS)
@torch.no_grad()
def test_it_is_converted_counted_and_merged(make: Callable[[str], Any], name: str, scheme: str):
    network, x = make(name)
    low = settled(lr.convert(network, scheme, input_size=x), x)
    assert any(len(change.before.partition(",")[0]) == 5 for change in lr.notes(low).conversion.changed)  # kxkxk
    assert lr.count(low, x).macs < lr.count(network, x).macs
    assert low(x).shape == network.eval()(x).shape
    assert_same(lr.merge(low, example_input=x, chains=True)(x), low(x))


@pytest.mark.parametrize(("make", "name"), NETWORKS)
@torch.no_grad()
def test_it_is_made_thinner(make: Callable[[str], Any], name: str):
    network, x = make(name)
    if name == "HighResNet 3-D":  # it pads its residuals to widths that it holds as numbers
        with pytest.raises(lr.LowRankError, match="its forward expects fixed widths"):
            lr.thin(network, width=0.5, multiple=4, input_size=x)
        return
    thin = lr.thin(network, width=0.5, multiple=4, input_size=x)
    assert thin.eval()(x).shape == network.eval()(x).shape
    assert lr.count(thin, x).macs < 0.6 * lr.count(network, x).macs
