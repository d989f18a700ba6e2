"""Whether a depthwise composite runs by our kernels, and the call that runs it.

Torch runs bands of channels one conv at a time, each reading part of every pixel, and copies the results together.
The kernels read each pixel once, and they run wherever they can: unlike for composites of deep filters, nothing is
timed first. `benchmarks/depthwise.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.depthwise.plan import Band, Pair
from lowrank_cnn.kernels.dispatch import may_fuse, needs_gradient, under_autocast
from lowrank_cnn.kernels.problem import parsed

MOST_TAPS = 81
"""Taps of a filter that one kernel unrolls: a square of 9 x 9."""


def depthwise_conv2d(
    x: Tensor,
    filters: Sequence[Tensor],
    bias: Tensor | None,
    bands: Sequence[Band],
    stride: Pair,
    dilation: Pair,
    size: Pair,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor | None:
    """Filter bands of channels, x [N, C, H, W], into maps of `size`; None where our kernels cannot.

    For inference alone, an activation follows in the same pass, and then a residual is added.
    """
    if not may_fuse(x):
        return None
    x = under_autocast(x)
    fits = x.shape[1] == sum(band.channels for band in bands) and min(size) > 0  # else torch says what is wrong
    if fits and not torch.compiler.is_compiling() and (noted := gpu.survey()) is not None:
        # Whether kernels run here is not asked: the answer would be that of a survey's tensors without values.
        if gpu.mode() != "off" and x.dtype in gpu.TYPES and max(band.taps for band in bands) <= MOST_TAPS:
            after = (*parsed(activation), residual is not None)
            noted.append(DepthwiseCall.of(x, filters, bias, bands, stride, dilation, size)._replace(after=after))
        return None
    alike = residual is None or (residual.dtype == x.dtype and residual.shape == (*x.shape[:2], *size))
    if not fits or not alike or _obstacle(x, bands):
        return None
    from lowrank_cnn.kernels.depthwise import ops

    numbers = [value for band in bands for value in band]
    after = (None, residual, *parsed(activation))
    return ops.depthwise_conv2d(x, list(filters), bias, numbers, stride, dilation, size, *after)


Like = tuple[torch.Size, torch.dtype, torch.device]


class DepthwiseCall(NamedTuple):
    """Shapes, types and options of a call, by which its kernels are compiled before it is made."""

    x: Like
    filters: tuple[Like, ...]
    bias: Like | None
    options: tuple[Any, ...]
    training: bool
    need_input: bool
    after: tuple[str, float, bool] = ("", 0.0, False)
    """The activation with its slope, and whether a residual is added."""

    @classmethod
    def of(
        cls, x: Tensor, filters: Sequence[Tensor], bias: Tensor | None, bands: Sequence[Band], *options: Any
    ) -> DepthwiseCall:
        like = _like(x), tuple(map(_like, filters)), None if bias is None else _like(bias)
        own = (tuple(value for band in bands for value in band), *options)
        return cls(*like, own, needs_gradient(x, *filters), x.requires_grad)

    def compile(self) -> None:
        """Launch every kernel, which serves batches of any size, on one image, within `compiling_ahead`."""
        from lowrank_cnn.kernels.depthwise import ops

        one = (torch.Size((1, *self.x[0][1:])), *self.x[1:])
        x, *filters = map(_empty, (one, *self.filters))
        bias, x = self.bias and _empty(self.bias), x.contiguous(memory_format=torch.channels_last)
        activation, slope, adds = self.after
        size = torch.Size((1, x.shape[1], *self.options[-1]))
        residual = _empty((size, *self.x[1:])).contiguous(memory_format=torch.channels_last) if adds else None
        y = ops.depthwise_conv2d(x, filters, bias, *self.options, None, residual, activation, slope)
        if self.training:
            ops.depthwise_conv2d_backward(y, x, filters, *self.options[:-1], self.need_input, bias is not None)


def _like(tensor: Tensor) -> Like:
    return tensor.shape, tensor.dtype, tensor.device


def _empty(like: Like) -> Tensor:
    return torch.empty(like[0], dtype=like[1], device=like[2])


def explain_depthwise(x: Tensor, bands: Sequence[Band]) -> str:
    """The path that such an input takes, and why."""
    if not may_fuse(x):
        return "torch (not on a GPU)"
    reason = _obstacle(under_autocast(x), bands)
    return f"torch ({reason})" if reason else "fused (all bands in one pass)"


def _obstacle(x: Tensor, bands: Sequence[Band]) -> str:
    if max(band.taps for band in bands) > MOST_TAPS:
        return f"filters of more than {MOST_TAPS} taps"
    takes = gpu.takes
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels.torch_compile import takes
    runs = takes(tuple(map(index, x.shape)), x.dtype, x.device, depthwise=True)
    return "" if runs else "the kernels do not run on this type, size or device"
