"""The composite layer by torch's own operations: the definition that every kernel is compared with.

`composite_by_torch` computes the same with the fastest operations that torch has: the rival of the fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.kernels.device import survey
from lowrank_cnn.kernels.problem import OVERLAPPING, Pair, Sides, activate, canonical

# The dense equivalents of smaller filters and of convolutions in a chain, as functions of their weights.


def compose(first: Tensor, second: Tensor, *, groups: int = 1) -> Tensor:
    """The weight of `second` after `first`; for example, [m, c, h, 1] and [d, m, 1, w] give [d, c, h, w].

    Along each axis one of the two must have a single tap. Both have the same channel groups.
    """
    if any(a > 1 and b > 1 for a, b in zip(first.shape[2:], second.shape[2:], strict=True)):
        raise ValueError(f"kernels of {tuple(first.shape[2:])} and {tuple(second.shape[2:])} reach along one axis")
    kernel = tuple(map(max, zip(first.shape[2:], second.shape[2:], strict=True)))
    middle, channels = first.shape[0] // groups, first.shape[1]
    left = first.reshape(groups, middle, channels, *first.shape[2:])
    right = second.reshape(groups, -1, middle, *second.shape[2:])
    if second.shape[2:].numel() == 1:  # a join mixes filters as a matrix product
        mixed = right.flatten(2) @ left.flatten(2)
        return mixed.reshape(-1, channels, *kernel)
    left = left.expand(-1, -1, -1, *kernel)
    right = right.expand(-1, -1, -1, *kernel)
    return torch.einsum("gdm...,gmc...->gdc...", right, left).reshape(-1, channels, *kernel)


def placed(weight: Tensor, kernel: Sequence[int], start: Sequence[int]) -> Tensor:
    """The weight in a larger kernel, its first tap at a place of it, zeros around."""
    axes = list(zip(weight.shape[2:], kernel, start, strict=True))
    return F.pad(weight, [side for taps, size, at in reversed(axes) for side in (at, size - taps - at)])


def ungrouped(weight: Tensor, groups: int) -> Tensor:
    """The weight [d, c / groups, h, w] of a conv with channel groups as [d, c, h, w], zeros between groups."""
    if groups == 1:
        return weight
    filters, channels = weight.shape[0] // groups, weight.shape[1]
    whole = weight.new_zeros(groups, filters, groups, channels, *weight.shape[2:])
    own = torch.arange(groups, device=weight.device)
    whole[own, :, own] = weight.unflatten(0, (groups, filters))
    return whole.reshape(groups * filters, groups * channels, *weight.shape[2:])


def composite_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    add_last: bool = False,
) -> Tensor:
    """One conv per group, concatenated, then bias, residual, activation and max-pool; runs on any device.

    With `add_last` the residual is added after the activation.
    """
    parts = [
        conv_on_sides(x, weight, part, list(sides), list(stride), [1] * len(sides))
        for weight, part, sides in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    return followed(interleaved(parts, 1, 1), residual, canonical(activation, relu), pool, add_last=add_last)


def composite_by_torch(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    activation: str | None = None,
    pool: str | None = None,
    residual: Tensor | None = None,
    add_last: bool = False,
) -> Tensor:
    """The reference in the type of the input: cuDNN's fused conv + bias + add + ReLU, or cuBLAS in training."""
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if x.is_cuda and is_product(x, weights, stride, padding):
        return followed(pointwise(x, weights[0], bias), residual, canonical(activation), pool, add_last=add_last)
    alone = residual is None or (len(weights) == 1 and residual.dtype == x.dtype and not add_last)
    tensors = [t for t in (x, *weights, bias, residual) if t is not None]
    if canonical(activation) != "relu" or not alone or not _cudnn_fuses(x, tensors, padding):
        options = {"stride": stride, "padding": padding, "residual": residual, "add_last": add_last}
        return composite_reference(x, weights, bias, **options, activation=activation, pool=pool)
    parts = [
        _conv_relu(x, weight.to(x.dtype), part, residual, stride, (rows[0], columns[0]))
        for weight, part, (rows, columns) in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    return followed(interleaved(parts, 1, 1), None, None, pool)


def is_product(x: Tensor, weights: Sequence[Tensor], stride: Sequence[int], padding: Sequence[Sides]) -> bool:
    """Whether a layer is trained as a product of matrices, whose gradients cuBLAS computes faster than cuDNN."""
    if len(weights) > 1 or weights[0].shape[2:].numel() > 1 or not torch.is_grad_enabled():
        return False
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    plain = max(stride) == 1 and not any(sum(padding[0], ())) and x.is_contiguous(memory_format=layout)
    return plain and not torch.compiler.is_exporting()


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 conv of channels-last maps as a product of matrices; the result is channels-last."""
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def enclosed(weights: Sequence[Tensor], padding: Sequence[Sides]) -> tuple[Tensor, Sides]:
    """One dense weight equivalent to all filter groups, with zeros around their taps, and its padding."""
    starts, kernel, sides = enclosure([weight.shape for weight in weights], padding)
    return torch.cat([placed(weight, kernel, start) for weight, start in zip(weights, starts, strict=True)]), sides


def enclosure(shapes: Sequence[Sequence[int]], padding: Sequence[Sides]) -> tuple[list[Pair], Pair, Sides]:
    """The position of each group's first tap in the enclosing dense kernel, and the kernel's size and padding."""
    top, left = (max(sides[axis][0] for sides in padding) for axis in (0, 1))
    starts = [(top - rows[0], left - columns[0]) for rows, columns in padding]
    height, width = (
        max(start[axis] + shape[2 + axis] for start, shape in zip(starts, shapes, strict=True)) for axis in (0, 1)
    )
    # All groups end at the same row and column.
    bottom = padding[0][0][1] + height - starts[0][0] - shapes[0][2]
    right = padding[0][1][1] + width - starts[0][1] - shapes[0][3]
    return starts, (height, width), ((top, bottom), (left, right))


def followed(
    y: Tensor, residual: Tensor | None, activation: str | None, pool: str | None, *, add_last: bool = False
) -> Tensor:
    """Finish a conv's result by torch: residual, activation, max-pool; with `add_last`, activation first."""
    if residual is not None and add_last:
        y = activate(y, activation) + residual
    else:
        y = activate(y if residual is None else y + residual, activation)
    if pool == OVERLAPPING:
        return F.max_pool2d(y, 3, 2, 1)
    return F.max_pool2d(y, 2, 2, ceil_mode=pool == "ceil") if pool else y


def _conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, (1, 1), 1)


def _cudnn_fuses(x: Tensor, tensors: Sequence[Tensor], padding: Sequence[Sides]) -> bool:
    """Whether cuDNN fuses bias and ReLU: eagerly, without gradients, 16 bits, equal sides, channels in eights."""
    eager = not torch.compiler.is_compiling() and survey() is None
    if not x.is_cuda or x.dim() != 4 or not eager or not torch.backends.cudnn.is_available():
        return False
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    halves = x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 8 == 0
    even = all(before == after >= 0 for sides in padding for before, after in sides)
    return halves and even and not graded


def _biases(bias: Tensor | None, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return bias.split([weight.shape[0] for weight in weights]) if bias is not None else [None] * len(weights)


def conv_on_sides(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sides: list[Pair],
    stride: list[int],
    dilation: list[int],
    groups: int = 1,
) -> Tensor:
    """A conv of two or three axes with any padding; unequal or negative sides are padded or cropped before it.

    Its options are lists because TorchScript has no tuples of any length.
    """
    padding = [before for before, _ in sides]
    if min(padding) < 0 or padding != [after for _, after in sides]:
        x, padding = pad_on_sides(x, sides, "constant"), [0] * len(sides)
    if len(sides) == 3:
        return F.conv3d(x, weight, bias, stride, padding, dilation, groups)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def pad_on_sides(x: Tensor, sides: list[Pair], mode: str) -> Tensor:
    """Pad by `F.pad`; sides that crop are cropped first, by slices: some engines have no negative pads."""
    front, back = sides[0] if len(sides) == 3 else (0, 0)
    top, bottom = sides[-2]
    left, right = sides[-1]
    if front < 0 or back < 0:
        x = x[..., max(-front, 0) : back if back < 0 else None, :, :]
    if top < 0 or bottom < 0:
        x = x[..., max(-top, 0) : bottom if bottom < 0 else None, :]
    if left < 0 or right < 0:
        x = x[..., max(-left, 0) : right if right < 0 else None]
    pads = [max(left, 0), max(right, 0), max(top, 0), max(bottom, 0), max(front, 0), max(back, 0)][
        : 2 * len(sides)
    ]
    return F.pad(x, pads, mode=mode) if any(pads) else x


def interleaved(parts: list[Tensor], channel_groups: int, axis: int, shuffle: bool = False) -> Tensor:
    """Concatenate the filter groups' outputs; filters of one channel group stay together, as in a grouped conv.

    With `shuffle` the first filters of all channel groups come first, then the second of all.
    """
    if channel_groups == 1:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
    if len(parts) == 1 and not shuffle:
        return parts[0]
    inner = axis + 1 if axis >= 0 else axis
    whole = torch.cat([part.unflatten(axis, [channel_groups, -1]) for part in parts], dim=inner)
    if shuffle:
        whole = whole.transpose(inner - 1, inner)
    return whole.flatten(inner - 1, inner)
