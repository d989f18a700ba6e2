"""Copy pixels of few channels to four channels each, with zeros around every image, for `window` and `overlap`.

If there are fewer than four channels, the one behind the last is set to one everywhere. Its weights are zero, so
the results do not change, and its gradient is the bias gradient.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.gpu import start
from lowrank_cnn.system.arithmetic import ceil_div

BLOCK = 1024


@triton.jit
def pad_channels(
    x,  # [N, H, W, CHANNELS]
    out,  # [N, padded H, padded W, 4], and rows beyond the last image
    places, batch, height, width, padded_height, padded_width,
    CHANNELS: tl.constexpr, BORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of padded pixels; those beyond the last image are padding too."""
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
    """[N * rows + beyond, columns, 4] from [N, H, W, C]: each image padded to `size`, with a border before it."""
    batch, height, width, channels = pixels.shape
    rows, columns = size
    out = pixels.new_empty((batch * rows + beyond, columns, 4))
    places = out.numel() // 4
    start(pad_channels, (ceil_div(places, BLOCK),))(
        pixels, out, places, batch, height, width, rows, columns, CHANNELS=channels, BORDER=border, BLOCK=BLOCK
    )
    return out
