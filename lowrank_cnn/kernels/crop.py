"""Gather random crops of stored images, mirrored, scaled and with a square cut out, in one pass over memory.

Indexing with tensors of coordinates needs three index values per pixel, which on a GPU takes far longer than
moving the bytes. Here a program writes one row of one output image, LANES values at a time. The pixels of a row
are neighbours in memory, and a mirrored row is read backwards. Bytes become floats on the way.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.device import on_its_device

LANES = 1024
"""Values that a program moves at once."""


@triton.jit
def crop_rows(
    images,  # [N, HEIGHT, WIDTH, CHANNELS]
    out,  # [n, height, width, CHANNELS], written
    rows,  # [n] int64: which image
    top,  # [n] int64: first row of the crop
    left,  # [n] int64: first column of the crop
    mirror,  # [n] uint8: 1 reads the row backwards
    cut_y,  # [n] int64: centre of the cut square
    cut_x,  # [n] int64
    mean,  # [CHANNELS] float32, or [1]: subtracted where SCALES
    deviation,  # the same: divided by
    height, full_height, full_width,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CUTOUT: tl.constexpr, LANES: tl.constexpr,
    SCALES: tl.constexpr, PAD: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One row of one crop."""
    n, y = tl.program_id(0), tl.program_id(1)
    # 64 bits: a set of images may have more than 2**31 values.
    source = (tl.load(rows + n) * full_height + tl.load(top + n) + y) * full_width + tl.load(left + n)
    target = (n.to(tl.int64) * height + y) * WIDTH * CHANNELS
    backwards = tl.load(mirror + n) > 0
    for first in tl.static_range(0, WIDTH * CHANNELS, LANES):
        lane = first + tl.arange(0, LANES)
        x, channel = lane // CHANNELS, lane % CHANNELS
        place = (source + tl.where(backwards, WIDTH - 1 - x, x)) * CHANNELS + channel
        pixel = tl.load(images + place, mask=lane < WIDTH * CHANNELS, other=0)
        if SCALES:
            one = channel * 0 if SHARED else channel
            pixel = tl.div_rn(pixel.to(tl.float32) - tl.load(mean + one), tl.load(deviation + one))
        if PAD > 0:
            row, column = tl.load(top + n) + y, tl.load(left + n) + tl.where(backwards, WIDTH - 1 - x, x)
            inside = (row >= PAD) & (row < full_height - PAD) & (column >= PAD) & (column < full_width - PAD)
            pixel = tl.where(inside, pixel, tl.zeros_like(pixel))
        if CUTOUT > 0:
            down = y - (tl.load(cut_y + n) - CUTOUT // 2)
            across = x - (tl.load(cut_x + n) - CUTOUT // 2)
            hole = (down >= 0) & (down < CUTOUT) & (across >= 0) & (across < CUTOUT)
            pixel = tl.where(hole, tl.zeros_like(pixel), pixel)
        tl.store(out + target + lane, pixel.to(out.dtype.element_ty), mask=lane < WIDTH * CHANNELS)


@on_its_device
def launch_crop(
    images: Tensor,
    rows: Tensor,
    top: Tensor,
    left: Tensor,
    mirror: Tensor,
    cut_y: Tensor,
    cut_x: Tensor,
    *,
    window: tuple[int, int],
    cutout: int,
    scaling: tuple[Tensor, Tensor] | None = None,
    pad: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Crops [n, height, width, channels] of contiguous images [N, H, W, channels].

    `scaling` has a mean and a deviation per channel, or one for all; `pad` pixels at each border give zero.
    """
    count, channels = len(rows), images.shape[3]
    lanes = min(LANES, triton.next_power_of_2(window[1] * channels))
    out = torch.empty((count, *window, channels), device=images.device, dtype=dtype or images.dtype)
    mean, deviation = scaling or (images, images)
    crop_rows[(count, window[0])](
        images, out, rows, top, left, mirror.to(torch.uint8), cut_y, cut_x, mean, deviation,
        window[0], images.shape[1], images.shape[2],
        WIDTH=window[1], CHANNELS=channels, CUTOUT=cutout, LANES=lanes,
        SCALES=scaling is not None, PAD=pad, SHARED=len(mean) == 1,
    )  # fmt: skip
    return out
