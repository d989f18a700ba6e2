"""A convolution on the CPU as plain matrix products, each written where its filters belong.

For an output as large as the input, tap (i, j) of a filter group adds W_ij X_ij, where W_ij is [filters, channels]
and X_ij the image [channels, pixels] shifted by (i, j). A shift along rows is an offset into the same memory, one
along columns a copy shared by all groups. The centre taps of all groups are a single product. So no patches are
gathered, nothing is concatenated, and rows of padding are never multiplied. An image of few channels makes such
products too thin: there each group gathers its patches and multiplies once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.deploy.blocks import BlockAsGiven, Epilogue, is_halving
from lowrank_cnn.kernels.strips import available, packed_strips, strips
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


# A convolution on the CPU by minimal filtering: four results of three taps for six products, not twelve.
#
# Winograd's F(4, 3) (Winograd 1980; Lavin and Gray 2016), along one axis: the one that a kx1 or 1xk group has,
# and the columns of a 3x3 group, whose three rows add up before the results are put together. A group of 1x1
# filters is a plain product. Pixels lie with their channels together, so that what makes six inputs out of six
# neighbours, and four results out of six products, is done to whole rows of channels.

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


# A layer of 1x3 and 3x1 filters on the CPU, by compiled minimal filtering (`kernels.strips`).

_ACROSS = ([0], [-1, 0, 1])
_DOWN = ([-1, 0, 1], [0])


class StripConv2d(nn.Module):
    """A conv or composite of such filters, of stride one and equal output size, with its epilogue; for inference.

    It keeps its layer, which runs inputs of another type, and where the compiled code is not installed.
    """

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        if not self.takes(layer):
            raise ValueError("not a convolution of stride one with 1x3 and 3x1 filters alone")
        weights, looks = weight_parts(layer) or ([], [])
        self.layer, self.epilogue = layer, epilogue or Epilogue()
        self.filters, self.across = [len(weight) for weight in weights], [look == _ACROSS for look in looks]
        self.relu = self.epilogue.activation == "relu" and not self.epilogue.adds
        self.rest = replace(self.epilogue, activation=None) if self.relu else self.epilogue
        self.pools = self.rest.pool is not None and is_halving(self.rest.pool) and not self.rest.adds
        self.pools = self.pools and self.rest.activation is None
        bias = layer.bias if isinstance(layer.bias, Tensor) else weights[0].new_zeros(sum(self.filters))
        self.register_buffer("bias", bias.detach().clone(), persistent=False)
        for index, weight in enumerate(weights):
            self.register_buffer(f"packed{index}", packed_strips(weight), persistent=False)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        parts = weight_parts(layer)
        if parts is None or not all(look in (_ACROSS, _DOWN) for look in parts[1]):
            return False
        return parts[0][0].device.type == "cpu" and available(parts[0][0].dtype)

    def plain(self) -> nn.Module:
        """The layer with what follows it: for programs that have no such code."""
        return BlockAsGiven(self.layer, self.epilogue)

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.get_buffer("bias")
        if x.dtype != bias.dtype or not available(x.dtype):
            return self.plain()(x, residual)
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]
        weights = [self.get_buffer(f"packed{index}") for index in range(len(self.filters))]
        pool = self.pools and x.shape[2] % 2 == x.shape[3] % 2 == 0
        y = strips(x, weights, bias, self.filters, self.across, self.relu, pool)
        return y if pool else self.rest(y, residual)


def has_strips(network: nn.Module) -> bool:
    """Whether a network has layers that compiled strips run, and these are installed."""
    return any(map(StripConv2d.takes, network.modules()))
