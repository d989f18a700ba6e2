"""Costs computed from a layer's options agree with the counter."""

import pytest
from torch import nn

from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import replacement
from lowrank_cnn.method.schemes import parse_scheme

SIZE = 16


@pytest.mark.parametrize("scheme", ["lr", "separable(m=6)", "lr-join(m=8)", "mixture(kx1, 1xk, kxk, join)"])
@pytest.mark.parametrize("groups", [1, 2])
def test_macs_per_pixel_are_those_that_the_counter_finds(scheme: str, groups: int):
    conv = nn.Conv2d(8, 12, 5, padding=2, groups=groups, bias=False)
    layer = replacement(conv, parse_scheme(scheme))
    found = count(layer, (8, SIZE, SIZE)).macs
    assert parse_scheme(scheme).macs(conv) * SIZE**2 == found
    assert parse_scheme(scheme).relative_cost(conv) == found / count(conv, (8, SIZE, SIZE)).macs


def test_the_first_half_of_a_strided_pair_computes_more_pixels():
    conv = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
    scheme = parse_scheme("separable(m=4)")
    found = count(replacement(conv, scheme), (8, SIZE, SIZE)).macs
    assert scheme.macs(conv) * (SIZE // 2) ** 2 == found


@pytest.mark.parametrize(
    ("conv", "scheme", "most"),
    [
        (nn.Conv2d(3, 64, 7), "separable", 21),
        (nn.Conv2d(64, 4, 3), "separable", 12),
        (nn.Conv2d(3, 64, 3), "channel", 27),
        (nn.Linear(10, 30), "channel", 10),
    ],
)
def test_more_filters_than_the_rank_of_the_weight_are_of_no_use(conv: nn.Module, scheme: str, most: int):
    assert parse_scheme(scheme).useful_rank(conv) == most
