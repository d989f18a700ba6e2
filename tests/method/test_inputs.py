"""Networks of any kind of input are counted and decomposed on an example."""

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import checked_size, known_inputs
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose


class Denoiser(nn.Module):
    """Takes an image and a number, as diffusion networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(1, 8)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.conv(x) + self.scale(step[:, None])[:, :, None, None]


EXAMPLE = (torch.randn(2, 8, 6, 6), torch.ones(2))


def test_several_inputs_are_counted_with_their_batch():
    assert count(Denoiser(), EXAMPLE).macs == 2 * (8 * 8 * 9 * 36 + 8)
    assert count(Denoiser(), EXAMPLE).input == (8, 6, 6)
    assert count(Denoiser(), {"step": EXAMPLE[1], "x": EXAMPLE[0]}).macs == count(Denoiser(), EXAMPLE).macs


@pytest.mark.parametrize(
    ("net", "size", "macs"),
    [
        (nn.Conv1d(4, 6, 3, padding=1, bias=False), (4, 10), 4 * 6 * 3 * 10),
        (nn.Conv3d(2, 3, 3, padding=1, bias=False), (2, 4, 4, 4), 2 * 3 * 27 * 64),
        (nn.Linear(5, 7, bias=False), (5,), 35),
    ],
)
def test_sizes_have_any_number_of_axes(net: nn.Module, size: tuple[int, ...], macs: int):
    assert count(net, size).macs == macs
    assert count(net, torch.randn(1, *size)).macs == macs


@pytest.mark.parametrize("transform", [convert, decompose])
def test_a_budget_is_kept_for_a_network_of_several_inputs(transform):
    net = Denoiser()
    new = transform(net, "separable", macs=0.7, input_size=dict(zip(("x", "step"), EXAMPLE, strict=True)))
    assert count(new, EXAMPLE).macs <= 0.7 * count(net, EXAMPLE).macs
    assert new(*EXAMPLE).shape == (2, 8, 6, 6)


@pytest.mark.parametrize("bad", [32, "3x8x8", (), (3, 0, 8), (3, 2**21, 8), (True, 8, 8), None, {"image": 3}])
def test_bad_sizes_are_refused_in_a_sentence(bad: object):
    with pytest.raises(LowRankError, match=r"channels, height, width.*\.$"):
        checked_size(bad)


def test_a_budget_needs_inputs():
    with pytest.raises(LowRankError, match="give input_size"):
        known_inputs(nn.Conv2d(3, 3, 3), None)
