"""Parameters that belong to no layer get the channels of the maps that they meet."""

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.thin import thin

SIZE = (3, 32, 32)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of maps, which come second."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        maps = input.permute(0, 2, 3, 1)
        maps = nn.functional.layer_norm(maps, self.normalized_shape, self.weight, self.bias, self.eps)
        return maps.permute(0, 3, 1, 2)


class ScaledBranch(nn.Module):
    """A residual branch as in ConvNeXt: layer norm, and a scale of every channel that belongs to no layer."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 64, 4, 4), ChannelNorm(64)
        self.deep = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.norm, self.wide, self.back = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.full((64,) if flat else (64, 1, 1), 0.25))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(x))
        y = self.back(nn.functional.gelu(self.wide(self.norm(self.deep(x).permute(0, 2, 3, 1))))).permute(
            0, 3, 1, 2
        )
        scale = self.scale.reshape(1, -1, 1, 1) if self.scale.dim() == 1 else self.scale
        return self.head((x + y.mul(scale)).mean((2, 3)))


@pytest.mark.parametrize("flat", [True, False])
def test_layer_norms_and_scales_follow_their_channels(flat: bool):
    net = ScaledBranch(flat)
    new = thin(net, width=0.5, input_size=SIZE)
    assert new.scale.shape == ((32,) if flat else (32, 1, 1))
    assert torch.equal(new.scale, torch.full_like(new.scale, 0.25))
    assert new.norm.normalized_shape == new.first.normalized_shape == (32,)
    assert torch.equal(new.norm.weight, torch.ones(32))
    assert new(torch.randn(2, *SIZE)).shape == (2, 10)
    assert net.scale.numel() == 64


def test_a_scale_of_different_values_has_no_thinner_form():
    net = ScaledBranch(flat=True)
    with torch.no_grad():
        net.scale.uniform_()
    with pytest.raises(LowRankError, match="nothing initialises scale in its new shape"):
        thin(net, width=0.5, input_size=SIZE)
