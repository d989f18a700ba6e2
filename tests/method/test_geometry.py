"""Padding and centring, against torch's own convolutions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.geometry import enclosing_padding, offsets, pair, recentred
from lowrank_cnn.method.spec import FilterGroup

X = torch.randn(1, 2, 9, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", ["same", "valid", 2, (1, 2)])
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2), (1, 5)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.filterwarnings("ignore:Using padding")
def test_any_padding_as_sides_is_the_convs_own(padding, kernel: tuple[int, int], dilation: tuple[int, int]):
    conv = nn.Conv2d(2, 3, kernel, padding=padding, dilation=dilation, bias=False, dtype=torch.float64)
    (top, bottom), (left, right) = enclosing_padding(padding, kernel, dilation)
    padded = F.pad(X, (left, right, top, bottom))
    torch.testing.assert_close(F.conv2d(padded, conv.weight, dilation=dilation), conv(X))


@pytest.mark.parametrize(("kernel", "enclosing"), [((3, 3), (5, 7)), ((2, 3), (4, 4)), ((1, 1), (3, 2))])
def test_a_kernel_within_a_larger_one_keeps_its_output_grid(kernel: tuple[int, int], enclosing: tuple[int, int]):
    weight = torch.randn(1, 2, *kernel, dtype=torch.float64)
    top, left = offsets(FilterGroup(*kernel, 1), enclosing)
    larger = torch.zeros(1, 2, *enclosing, dtype=torch.float64)
    larger[:, :, top : top + kernel[0], left : left + kernel[1]] = weight
    (up, down), (before, after) = recentred(((1, 1), (1, 1)), kernel, enclosing, (1, 1))
    wide = F.conv2d(F.pad(X, (before, after, up, down)), larger)
    torch.testing.assert_close(wide, F.conv2d(F.pad(X, (1, 1, 1, 1)), weight))


@pytest.mark.parametrize(
    "call",
    [lambda: pair(0, "stride"), lambda: pair((1, 2, 3), "stride"), lambda: enclosing_padding(-1, (3, 3), (1, 1))],
)
def test_bad_sizes_are_refused_in_a_sentence(call):
    with pytest.raises(LowRankError, match=r"\.$"):
        call()
