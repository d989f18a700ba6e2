"""Copy the weights of all groups of a layer in one launch, between any two layouts and types.

A training step packs the weights of every layer and unpacks their gradients. Group by group that would be about a
hundred launches of two microseconds, as long as the layers' own kernels. A program copies one block of one group.
Sizes and strides are read from a small tensor, so that one compiled kernel serves all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.device import on_its_device, start

MOST_GROUPS = 4
BLOCK = 1024
FIELDS = tl.constexpr(12)


@triton.jit
def copy_values(
    source, target,  # [filters, channels, height, width], in any layout
    fields,  # [12] int32: values, channels, taps, columns of taps, strides of the source, strides of the target
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of one group."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = index < tl.load(fields)
    channels, taps, width = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    channel, tap, filter = index % channels, index // channels % taps, index // (channels * taps)
    down, right = tap // width, tap % width
    away = filter * tl.load(fields + 4) + channel * tl.load(fields + 5)
    away += down * tl.load(fields + 6) + right * tl.load(fields + 7)
    value = tl.load(source + away, mask=keep)
    away = filter * tl.load(fields + 8) + channel * tl.load(fields + 9)
    away += down * tl.load(fields + 10) + right * tl.load(fields + 11)
    tl.store(target + away, value.to(target.dtype.element_ty), mask=keep)


@triton.jit
def copy_all(
    s0, s1, s2, s3,  # each group's [filters, channels, height, width], in any layout
    t0, t1, t2, t3,  # the same, written
    fields,  # [groups, 12] int32: see `copy_values`
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of the group that the program's second index names."""
    group = tl.program_id(1)
    if group == 0:
        copy_values(s0, t0, fields, BLOCK)
    elif group == 1:
        copy_values(s1, t1, fields + FIELDS, BLOCK)
    elif group == 2:
        copy_values(s2, t2, fields + 2 * FIELDS, BLOCK)
    else:
        copy_values(s3, t3, fields + 3 * FIELDS, BLOCK)


@on_its_device
def launch_copy(*sources: Tensor, targets: Sequence[Tensor]) -> None:
    """Run the kernel, for at most `MOST_GROUPS` groups at once; a group has fewer than 2^31 values."""
    if len(sources) > MOST_GROUPS:
        launch_copy(*sources[MOST_GROUPS:], targets=targets[MOST_GROUPS:])
    sources, targets = sources[:MOST_GROUPS], targets[:MOST_GROUPS]
    shapes = tuple((tuple(s.shape), s.stride(), t.stride()) for s, t in zip(sources, targets, strict=True))
    last = MOST_GROUPS - len(sources)  # not read
    blocks = ceil_div(max(source.numel() for source in sources), BLOCK)
    start(copy_all, (blocks, len(sources)))(
        *(source.detach() for source in sources), *[sources[-1].detach()] * last, *targets, *[targets[-1]] * last,
        _fields(shapes, sources[0].device), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _fields(shapes: tuple[tuple[tuple[int, ...], ...], ...], device: torch.device) -> Tensor:
    rows = [
        [filters * channels * height * width, channels, height * width, width, *source, *target]
        for (filters, channels, height, width), source, target in shapes
    ]
    return torch.tensor(rows, dtype=torch.int32).to(device)


# Copy pixels of few channels to four channels each, with zeros around every image, for `window` and `overlap`.
#
# If there are fewer than four channels, the one behind the last is set to one everywhere. Its weights are zero,
# so the results do not change, and its gradient is the bias gradient.


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
