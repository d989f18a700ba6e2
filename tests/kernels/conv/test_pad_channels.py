"""Images of few channels become images of four with zeros around, and a channel of ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.copies import launch_pad_channels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_value_and_every_zero(channels):
    pixels = torch.randn(3, 5, 7, channels, device=DEVICE)
    padded = launch_pad_channels(pixels, (8, 10), beyond=4)
    right = F.pad(pixels, (0, 4 - channels, 1, 2, 1, 2)).flatten(0, 1)
    right = torch.cat([right, right.new_zeros(4, 10, 4)])
    right[..., channels : channels + 1] = 1
    assert torch.equal(padded, right)
