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

from lowrank_cnn.kernels.gpu import start
from lowrank_cnn.kernels.tiles import ceil_div

BLOCK = 1024


@triton.jit
def pad_channels(
    x,  # [N, H, W, CHANNELS]
    out,  # [N, padded H, padded W, 4], and rows beyond the last image
    places, batch, height, width, padded_height, padded_width,
    CHANNELS: tl.constexpr, BORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of padded pixels; those beyond the last image are as those around it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = place % padded_width - BORDER
    row = place // padded_width % padded_height - BORDER
    image = place // (padded_width * padded_height)
    inside = (image < batch) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    channel = tl.arange(0, 4)
    source = ((image * height + row) * width + column)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + source, mask=inside[:, None] & (channel < CHANNELS)[None, :], other=0.0)
    value = tl.where((channel == CHANNELS)[None, :], 1.0, value)
    tl.store(out + place[:, None] * 4 + channel[None, :], value, mask=(place < places)[:, None])


def launch_pad_channels(pixels: Tensor, size: tuple[int, int], beyond: int, border: int = 1) -> Tensor:
    """[N * rows + beyond, columns, 4] of [N, H, W, C]: each image padded to `size`, after a border."""
    batch, height, width, channels = pixels.shape
    rows, columns = size
    out = pixels.new_empty((batch * rows + beyond, columns, 4))
    places = out.numel() // 4
    start(pad_channels, (ceil_div(places, BLOCK),))(
        pixels, out, places, batch, height, width, rows, columns, CHANNELS=channels, BORDER=border, BLOCK=BLOCK
    )
    return out
