"""A convolution on the CPU by minimal filtering: four results of three taps for six products, not twelve.

Winograd's F(4, 3) (Winograd 1980; Lavin and Gray 2016), along one axis: the one that a kx1 or 1xk group has, and
the columns of a 3x3 group, whose three rows add up before the results are put together. A group of 1x1 filters is
a plain product. Pixels lie with their channels together, so that what makes six inputs out of six neighbours, and
four results out of six products, is done to whole rows of channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.deploy.blocks import Epilogue
from lowrank_cnn.deploy.matrix import filled_layer, skeleton, weight_parts

STEP, PRODUCTS = 4, 6
FEWEST = 32
"""Channels below which making the inputs takes longer than the products saved."""
THREE = [-1, 0, 1]
FILTERS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
"""Six matrices out of three taps."""


@dataclass(frozen=True)
class _Group:
    """Filters `first` to `last`, the axis they are filtered along (1: rows, 2: columns, 0: none), rows to add."""

    first: int
    last: int
    axis: int
    rows: int


class WinogradConv2d(nn.Module):
    """A conv or composite of stride one and equal output size, with what follows it; for inference."""

    shape_of: nn.Module

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        if not self.takes(layer):
            raise ValueError("not a convolution of stride one with three taps along an axis")
        parts = weight_parts(layer)
        assert parts is not None
        self.epilogue, self.filters = epilogue or Epilogue(), sum(len(weight) for weight in parts[0])
        self.groups: list[_Group] = []
        first = 0
        for index, (weight, looks) in enumerate(zip(*parts, strict=True)):
            axis = _axis(looks) or 0
            rows = weight.shape[2] if axis == 2 else 1
            self.groups.append(_Group(first, first + len(weight), axis, rows))
            self.register_buffer(f"matrices{index}", _matrices(weight, axis))
            first += len(weight)
        bias = layer.bias if isinstance(layer.bias, Tensor) else parts[0][0].new_zeros(self.filters)
        self.register_buffer("bias", bias.detach().clone())
        self.__dict__["shape_of"] = skeleton(layer)  # known, but no part: it has no weights

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        parts = weight_parts(layer)
        if parts is None or parts[0][0].shape[1] < FEWEST:
            return False
        axes = [_axis(looks) for looks in parts[1]]
        return None not in axes and any(axes)

    def plain(self) -> nn.Module:
        """The layer that it was made of, with what follows it: for programs that filter in ways of their own."""
        made = [_taps(self.get_buffer(f"matrices{index}"), group.axis) for index, group in enumerate(self.groups)]
        return filled_layer(self.shape_of, made, self.get_buffer("bias"), self.epilogue)

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None], None if residual is None else residual[None])[0]
        pixels = x.permute(0, 2, 3, 1).contiguous()
        y = pixels.new_empty(*pixels.shape[:3], self.filters)
        inputs: dict[int, list[Tensor]] = {}
        for index, group in enumerate(self.groups):
            matrices, target = self.get_buffer(f"matrices{index}"), y[..., group.first : group.last]
            bias = self.get_buffer("bias")[group.first : group.last]
            if not group.axis:
                torch.add(pixels @ matrices[0, 0], bias, out=target)
                continue
            if group.axis not in inputs:
                most = max(other.rows for other in self.groups if other.axis == group.axis)
                inputs[group.axis] = _inputs(pixels, group.axis, most // 2)
            products = _products(inputs[group.axis], matrices, pixels.shape[1] if group.axis == 2 else None)
            _write(target, products, bias, group.axis)
        return self.epilogue(y.permute(0, 3, 1, 2), residual)


def _axis(looks: tuple[list[int], list[int]]) -> int | None:
    """The axis of a group, zero for a 1x1 filter, None for a group of another kind."""
    rows, columns = looks
    if columns == THREE and rows in (THREE, [0]):
        return 2
    if rows == THREE and columns == [0]:
        return 1
    return 0 if rows == columns == [0] else None


def _matrices(weight: Tensor, axis: int) -> Tensor:
    """[rows added, products, channels, filters] of a group, made in float64."""
    if not axis:
        return weight.flatten(1).t().contiguous()[None, None]
    taps = weight.double().permute(2, 3, 1, 0) if axis == 2 else weight.double().permute(3, 2, 1, 0)
    made = torch.einsum("pt,rtcf->rpcf", torch.tensor(FILTERS, dtype=torch.float64), taps)
    return made.to(weight.dtype).contiguous()


def _taps(matrices: Tensor, axis: int) -> Tensor:
    """[filters, channels, height, width]: the weight from which `_matrices` was computed, up to rounding."""
    if not axis:
        return matrices[0, 0].t()[:, :, None, None]
    m = matrices.double()
    taps = torch.stack([4 * m[:, 0], 3 * (m[:, 2] - m[:, 1]), m[:, 5]], dim=1)
    weight = taps.permute(3, 2, 0, 1) if axis == 2 else taps.permute(3, 2, 1, 0)
    return weight.to(matrices.dtype)


def _inputs(pixels: Tensor, axis: int, beside: int) -> list[Tensor]:
    """Six inputs for every four pixels along the axis, with `beside` rows of zeros around where rows add up."""
    spare = -pixels.shape[axis] % STEP
    sides = (0, 0, 0, 0, 1, 1 + spare) if axis == 1 else (0, 0, 1, 1 + spare, beside, beside)
    padded = F.pad(pixels, sides)
    length = padded.shape[axis] - 2
    d = [_every(padded, axis, k, k + length - STEP + 1) for k in range(PRODUCTS)]
    even, odd = d[4] - 4 * d[2], d[3] - 4 * d[1]
    apart, twice = d[4] - d[2], 2 * (d[3] - d[1])
    first = torch.add(4 * d[0], d[2], alpha=-5).add_(d[4])
    last = torch.add(4 * d[1], d[3], alpha=-5).add_(d[5])
    return [first, even + odd, even - odd, apart + twice, apart - twice, last]


def _products(inputs: list[Tensor], matrices: Tensor, height: int | None) -> list[Tensor]:
    """Six products; of a group with several rows, those of its rows added up (`height` rows of results remain)."""
    rows, _, channels, filters = matrices.shape
    found = []
    for index, values in enumerate(inputs):
        if height is None or values.shape[1] == height:
            found.append((values.reshape(-1, channels) @ matrices[0, index]).view(*values.shape[:3], filters))
            continue
        beside = (values.shape[1] - height) // 2
        out = values.new_empty(len(values), height, values.shape[2], filters)
        for n, image in enumerate(values):
            flat = out[n].view(-1, filters)
            for row in range(rows):
                start = beside - rows // 2 + row
                seen = image[start : start + height].reshape(-1, channels)
                flat.addmm_(seen, matrices[row, index], beta=1 if row else 0)
        found.append(out)
    return found


def _write(target: Tensor, products: list[Tensor], bias: Tensor, axis: int) -> None:
    """Four results out of every six products; those beyond the image are left out."""
    m0, m1, m2, m3, m4, m5 = products
    p, q = (m1 + m2).add_(bias), (m1 - m2).add_(bias)
    r, s = m3 + m4, m3 - m4
    results = ((m0.add_(p), r, 1), (q, s, 2), (p, r, 4), (m5.add_(q), s, 8))
    for k, (one, other, scale) in enumerate(results):
        place = _every(target, axis, k, target.shape[axis])
        size = place.shape[axis]
        torch.add(one.narrow(axis, 0, size), other.narrow(axis, 0, size), alpha=scale, out=place)


def _every(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """Every fourth slice along an axis."""
    return x[(slice(None),) * axis + (slice(start, stop, STEP),)]
