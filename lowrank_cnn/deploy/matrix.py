"""A convolution on the CPU as plain matrix products, each written where its filters belong.

For an output as large as the input, tap (i, j) of a filter group adds W_ij X_ij, where W_ij is [filters, channels]
and X_ij the image [channels, pixels] shifted by (i, j). A shift along rows is an offset into the same memory, one
along columns a copy shared by all groups. The centre taps of all groups are a single product. So no patches are
gathered, nothing is concatenated, and rows of padding are never multiplied. An image of few channels makes such
products too thin: there each group gathers its patches and multiplies once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.deploy.blocks import BlockAsGiven, Epilogue
from lowrank_cnn.method.geometry import Sides, enclosing_padding
from lowrank_cnn.method.layers import CompositeConv2d, weights_of
from lowrank_cnn.method.spec import Pair

_THIN = 32
"""Below this many channels the taps of a group are stacked into one product."""


@dataclass(frozen=True)
class _Tap:
    """Where a tap looks (rows down, columns right), and which filters it belongs to."""

    down: int
    right: int
    first: int
    last: int


class MatrixConv2d(nn.Module):
    """A conv or composite of stride one and equal output size, with what follows it; for inference."""

    shape_of: nn.Module

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        parts = weight_parts(layer)
        if parts is None:
            raise ValueError("not a convolution of stride one whose output is as large as its input")
        weights, steps = parts
        self.epilogue, self.filters = epilogue or Epilogue(), sum(weight.shape[0] for weight in weights)
        bias = layer.bias if isinstance(layer.bias, Tensor) else weights[0].new_zeros(self.filters)
        self.register_buffer("bias", bias.detach()[:, None].clone())
        self.thin = weights[0].shape[1] < _THIN
        products = _stacked(weights, steps) if self.thin else _spread(weights, steps)
        self.taps = [taps for taps, _ in products]
        self.__dict__["shape_of"] = skeleton(layer)  # known, but no part: it has no weights
        for index, (_, matrix) in enumerate(products):
            self.register_buffer(f"matrix{index}", matrix.contiguous())

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        return weight_parts(layer) is not None

    def plain(self) -> nn.Module:
        """The layer that it was made of, with what follows it: for programs that have products of their own."""
        matrices = [self.get_buffer(f"matrix{index}") for index in range(len(self.taps))]
        shapes = [tuple(weight.shape) for weight in weights_of(self.shape_of)]
        made = _unstacked(matrices, shapes) if self.thin else _gathered(matrices, self.taps, shapes)
        return filled_layer(self.shape_of, made, self.get_buffer("bias").flatten(), self.epilogue)

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None], None if residual is None else residual[None])[0]
        images, channels, height, width = x.shape
        x = x.contiguous()  # once: shifting an image in channels_last would reorder it for every shift
        y = x.new_empty(images, self.filters, height * width)
        shifted: dict[int, Tensor] = {}
        for index, taps in enumerate(self.taps):
            matrix = self.get_buffer(f"matrix{index}")
            for tap in taps:
                if tap.right not in shifted:
                    shifted[tap.right] = _seen_from(x, 0, tap.right)
            for n in range(images):
                if self.thin:
                    self._write_stack(y[n], shifted, n, matrix, taps)
                else:
                    self._add(y[n], shifted[taps[0].right][n].view(channels, -1), matrix, taps[0], width)
        return self.epilogue(y.view(images, self.filters, height, width), residual)

    def _add(self, y: Tensor, x: Tensor, matrix: Tensor, tap: _Tap, width: int) -> None:
        """One tap: the centre writes, and every other adds, over the rows that it can see."""
        if (tap.down, tap.right) == (0, 0):
            torch.addmm(self.get_buffer("bias"), matrix, x, out=y)
            return
        pixels, offset = y.shape[1], tap.down * width
        start, stop = max(-offset, 0), pixels - max(offset, 0)
        if start < stop:
            y[tap.first : tap.last, start:stop].addmm_(matrix, x[:, start + offset : stop + offset])

    def _write_stack(
        self, y: Tensor, shifted: dict[int, Tensor], n: int, matrix: Tensor, taps: list[_Tap]
    ) -> None:
        """All taps of a group at once, over its gathered patches."""
        patches = [_seen_from(shifted[tap.right][n], tap.down, 0) for tap in taps]
        first, last = taps[0].first, taps[0].last
        bias = self.get_buffer("bias")[first:last]
        torch.addmm(bias, matrix, torch.cat(patches).view(matrix.shape[1], -1), out=y[first:last])


def _seen_from(x: Tensor, down: int, right: int) -> Tensor:
    """The image as a tap sees it, zeros beyond its border."""
    height, width = x.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        return torch.zeros_like(x)
    return F.pad(x, (-right, right, -down, down)) if down or right else x


Products = list[tuple[list[_Tap], Tensor]]
"""Matrices, and the taps that each stands for."""


def weight_parts(layer: nn.Module) -> tuple[list[Tensor], list[tuple[list[int], list[int]]]] | None:
    """Each group's weight, and how far each of its rows and columns looks; None for a layer of another kind."""
    if isinstance(layer, CompositeConv2d):
        weights, sides, groups = list(layer.weights), list(layer.group_padding), layer.channel_groups
    elif type(layer) is nn.Conv2d:
        weights, groups = [layer.weight], layer.groups
        sides = [enclosing_padding(layer.padding, layer.kernel_size, layer.dilation)]  # type: ignore[arg-type]
    else:
        return None
    if groups > 1 or layer.padding_mode != "zeros" or tuple(layer.stride) != (1, 1):  # type: ignore[arg-type]
        return None
    looks = [_looks(w, both, layer.dilation) for w, both in zip(weights, sides, strict=True)]  # type: ignore[arg-type]
    centred = all(0 in rows and 0 in columns for rows, columns in looks)
    same = all(_is_same(w, both, layer.dilation) for w, both in zip(weights, sides, strict=True))  # type: ignore[arg-type]
    return ([weight.detach() for weight in weights], looks) if same and centred else None


def _looks(weight: Tensor, sides: Sides, dilation: Pair) -> tuple[list[int], list[int]]:
    rows, columns = (
        [step * tap - before for tap in range(size)]
        for size, (before, _), step in zip(weight.shape[2:], sides, dilation, strict=True)
    )
    return rows, columns


def _is_same(weight: Tensor, sides: Sides, dilation: Pair) -> bool:
    axes = zip(weight.shape[2:], sides, dilation, strict=True)
    return all(sum(both) == step * (size - 1) for size, both, step in axes)


def _stacked(weights: list[Tensor], looks: list[tuple[list[int], list[int]]]) -> Products:
    """One product per group, over all of its taps."""
    products, first = [], 0
    for weight, (rows, columns) in zip(weights, looks, strict=True):
        last = first + weight.shape[0]
        taps = [_Tap(down, right, first, last) for down in rows for right in columns]
        products.append((taps, weight.permute(0, 2, 3, 1).flatten(1)))
        first = last
    return products


def _spread(weights: list[Tensor], looks: list[tuple[list[int], list[int]]]) -> Products:
    """One product per tap; the centre taps of all groups together, and first."""
    centre, others, first = [], [], 0
    for weight, (rows, columns) in zip(weights, looks, strict=True):
        last = first + weight.shape[0]
        for i, down in enumerate(rows):
            for j, right in enumerate(columns):
                if (down, right) == (0, 0):
                    centre.append(weight[:, :, i, j])
                else:
                    others.append(([_Tap(down, right, first, last)], weight[:, :, i, j]))
        first = last
    return [([_Tap(0, 0, 0, first)], torch.cat(centre)), *others]


def _unstacked(matrices: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The weights from which `_stacked` made its products."""
    pairs = zip(matrices, shapes, strict=True)
    return [matrix.view(f, h, w, c).permute(0, 3, 1, 2) for matrix, (f, c, h, w) in pairs]


def _gathered(matrices: list[Tensor], taps: list[list[_Tap]], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The weights from which `_spread` made its products: the one tap that a group lacks is its centre."""
    others = list(zip(matrices[1:], (each[0] for each in taps[1:]), strict=True))
    weights, first = [], 0
    for filters, channels, height, width in shapes:
        own = {(tap.down, tap.right): matrix for matrix, tap in others if tap.first == first}
        own[0, 0] = matrices[0][first : first + filters]
        stacked = torch.stack([own[place] for place in sorted(own)], dim=-1)
        weights.append(stacked.view(filters, channels, height, width))
        first += filters
    return weights


def skeleton(layer: nn.Module) -> nn.Module:
    """A layer without its weights: what is needed to make it again."""
    return copy.deepcopy(layer).to("meta")


def filled_layer(shape: nn.Module, weights: list[Tensor], bias: Tensor, epilogue: Epilogue) -> nn.Module:
    """A layer made again out of its skeleton, and what follows it."""
    layer = copy.deepcopy(shape).to_empty(device=bias.device).to(bias.dtype)
    with torch.no_grad():
        for target, weight in zip(weights_of(layer), weights, strict=True):
            target.copy_(weight)
        if isinstance(layer.bias, Tensor):
            layer.bias.copy_(bias)
    return BlockAsGiven(layer, epilogue).eval()
