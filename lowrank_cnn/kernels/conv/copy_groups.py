"""Copy the weights of all groups of a layer in one launch, between any two layouts, cast on the way.

A training step packs every layer's weights anew and unpacks their gradients. Group by group that would be some
hundred launches of two microseconds, as long as the layers' own kernels. Sizes and strides are read from a small
tensor, so that one compiled kernel serves all layers.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.gpu import on_its_device, start

MOST_GROUPS = 4
BLOCK = 1024
FIELDS = tl.constexpr(12)


@triton.jit
def copy_values(source, target, fields, BLOCK: tl.constexpr):
    """A block of one group: `fields` are its values, channels, taps, columns of taps, and the strides of both."""
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
    fields,  # [groups, 12], whole numbers: see `copy_values`
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one group."""
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
    """Run the kernel; there are at most `MOST_GROUPS` groups, and a group has fewer than 2^31 values."""
    shapes = tuple((tuple(s.shape), s.stride(), t.stride()) for s, t in zip(sources, targets, strict=True))
    last = MOST_GROUPS - len(sources)  # not read
    blocks = -(-max(source.numel() for source in sources) // BLOCK)
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
