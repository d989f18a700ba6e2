"""Two convs in a chain as one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lowrank_cnn.kernels.reference import compose


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"), [((3, 1), (1, 3)), ((3, 3), (1, 1)), ((1, 1), (3, 3)), ((1, 5), (3, 1))]
)
def test_the_composed_conv_is_the_chain(first, second, groups):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    down = torch.randn(6, 4 // groups, *first, dtype=torch.float64)
    across = torch.randn(8, 6 // groups, *second, dtype=torch.float64)
    chain = F.conv2d(F.conv2d(x, down, groups=groups), across, groups=groups)
    assert torch.allclose(F.conv2d(x, compose(down, across, groups=groups), groups=groups), chain)


def test_taps_along_one_axis_are_refused():
    with pytest.raises(ValueError, match="reach along one axis"):
        compose(torch.zeros(2, 2, 3, 1), torch.zeros(2, 2, 3, 1))
