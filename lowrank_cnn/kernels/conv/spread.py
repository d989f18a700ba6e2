"""Pixels of few channels copied to four channels each, zeros around every image: what the window kernels read.

The channel after the last is one everywhere, if there is room: weights of zero leave it out of the results, and
its gradient is that of a bias.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.conv.start import start

BLOCK = 1024


@triton.jit
def spread(
    x, out, places, batch, height, width, padded_height, padded_width,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of padded pixels; those beyond the last image are as those around it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = place % padded_width - 1
    row = place // padded_width % padded_height - 1
    image = place // (padded_width * padded_height)
    inside = (image < batch) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    channel = tl.arange(0, 4)
    source = ((image * height + row) * width + column)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + source, mask=inside[:, None] & (channel < CHANNELS)[None, :], other=0.0)
    value = tl.where((channel == CHANNELS)[None, :], 1.0, value)
    tl.store(out + place[:, None] * 4 + channel[None, :], value, mask=(place < places)[:, None])


def launch_spread(pixels: Tensor, size: tuple[int, int], beyond: int) -> Tensor:
    """[N * rows + beyond, columns, 4] of [N, H, W, C]: each image padded to `size`, its first pixel at 1, 1."""
    batch, height, width, channels = pixels.shape
    rows, columns = size
    out = pixels.new_empty((batch * rows + beyond, columns, 4))
    places = out.numel() // 4
    start(spread, (-(-places // BLOCK),))(
        pixels, out, places, batch, height, width, rows, columns, CHANNELS=channels, BLOCK=BLOCK
    )
    return out
