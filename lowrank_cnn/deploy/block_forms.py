"""The ways in which a block can be run. `CANDIDATES` is a table: another way is one more entry.

A candidate makes a module out of a block, or None if it does not apply; `plan` measures them all. The module takes
the block's input and, if the block adds one, its residual. `GroupsApart` is for engines, which fuse by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.deploy.blocks import HALVING, Block, BlockAsGiven, Epilogue, pattern_block
from lowrank_cnn.graph.capture import CaptureError, capture
from lowrank_cnn.graph.fused_between import fused_pool
from lowrank_cnn.graph.merge import InexactError, merge_chain
from lowrank_cnn.graph.patterns import find_patterns, rewritten
from lowrank_cnn.kernels.fused_convs import FrozenComposite, conv_options, pool_name
from lowrank_cnn.kernels.strips import available, packed_strips, strips
from lowrank_cnn.method.geometry import enclosing_padding
from lowrank_cnn.method.layers import CompositeConv2d, conv_of
from lowrank_cnn.method.rewrite import copy_with, laid_out_as
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.spec import Composite

# A block by the GPU kernels: filters, bias, residual, activation and max-pool in one launch.


class FusedBlock(nn.Module):
    """The layers of a block by the kernels; the last launch includes the epilogue.

    A pool that no conv kernel supports runs after it, if possible by a kernel of its own.
    """

    def __init__(self, layers: Sequence[nn.Module], pool: nn.Module | None, epilogue: Epilogue) -> None:
        super().__init__()
        self.layers, self.pool, self.epilogue = nn.ModuleList(layers), pool, epilogue

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> FusedBlock | None:
        """A block of a conv, composite or chain; None if the kernels do not support one of its layers."""
        stages = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
        known = [options for options in map(conv_options, stages) if options is not None]
        if len(known) < len(stages):
            return None
        name = None if epilogue.pool is None else pool_name(epilogue.pool)
        known[-1] |= {"activation": epilogue.activation, "pool": name, "add_last": epilogue.add_last}
        made = [FrozenComposite(**options).eval() for options in known]
        apart = None if epilogue.pool is None or name else fused_pool(epilogue.pool) or epilogue.pool
        return cls(made, apart, epilogue)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        *front, last = self.layers
        for layer in front:
            x = layer(x)
        y = last(x, None if residual is None else residual.expand(_result_shape(last, x)))
        return y if self.pool is None else self.pool(y)

    def extra_repr(self) -> str:
        return str(self.epilogue)


def _result_shape(layer: Any, x: Tensor) -> tuple[int, ...]:
    """The shape of a conv's result, which a residual must have for the kernels."""
    taps, sides = layer.weights[0].shape[2:], layer.padding[0]
    axes = zip(x.shape[2:], taps, sides, layer.stride, strict=True)
    sizes = ((size + sum(pads) - reach) // step + 1 for size, reach, pads, step in axes)
    return x.shape[0], sum(weight.shape[0] for weight in layer.weights), *sizes


Candidate = Callable[[Block], nn.Module | None]


class Staged(nn.Module):
    """The first layers of a chain one after the other, then the last one with the block's epilogue."""

    def __init__(self, front: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.front, self.last = nn.Sequential(*front), last

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.last(self.front(x), residual)


class ByGroup(nn.Module):
    """Apply the epilogue to each filter group, so that less is concatenated."""

    def __init__(self, convs: list[nn.Module], epilogue: Epilogue) -> None:
        super().__init__()
        self.convs, self.epilogue = nn.ModuleList(convs), epilogue
        self.filters = [int(conv.out_channels) for conv in convs]  # type: ignore[arg-type]
        self.axis = -1 - len(convs[0].stride)  # type: ignore[arg-type]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rest = [None] * len(self.filters) if residual is None else residual.split(self.filters, dim=self.axis)
        parts = [self.epilogue(conv(x), part) for conv, part in zip(self.convs, rest, strict=True)]
        return torch.cat(parts, dim=self.axis) if len(parts) > 1 else parts[0]


class GroupsApart(ByGroup):
    """The same step by step: a runtime fuses a conv with the activation right after it, and has its own pools.

    A residual is added after the concatenation. Every conv has its own bias, because runtimes need constants.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self.epilogue.in_order(torch.cat([conv(x) for conv in self.convs], dim=self.axis), residual)
        return torch.cat([self.epilogue.in_order(conv(x)) for conv in self.convs], dim=self.axis)


def groups_apart(model: nn.Module) -> nn.Module:
    """A copy in which the groups of every composite are rectified and pooled before they are concatenated.

    The result is the same, and a runtime can then fuse a conv with the ReLU after it. A network that cannot be
    captured stays as it is.
    """
    try:
        captured = capture(copy_with(model)).complete()
    except CaptureError:
        return model
    made: dict[str, nn.Module] = {}
    patterns = []
    for pattern in find_patterns(captured):
        block = pattern_block(captured, pattern)
        stages = [_apart(layer) for layer in _stages(block.layer)]
        if any(len(convs) > 1 for convs in stages):
            *front, last = stages
            before: list[nn.Module] = [GroupsApart(convs, Epilogue()) for convs in front]
            made[pattern.name] = Staged(before, GroupsApart(last, block.epilogue)).eval()
            patterns.append(pattern)
    return rewritten(captured, patterns, lambda pattern: made[pattern.name]).eval() if patterns else model


def _apart(layer: nn.Module) -> list[nn.Module]:
    """The convs of a layer's groups: their biases are then constants, which not every engine can split."""
    if not isinstance(layer, CompositeConv2d) or len(layer.weights) == 1:
        return [layer]
    return _split(layer) or [layer]


# A conv or composite of stride one and equal output size on the CPU, by minimal filtering: four results of three
# taps for six products, not twelve.

Looks = tuple[list[int], list[int]]
"""How far a filter reads down and to the right of its output pixel."""
THREE = [-1, 0, 1]


def weight_parts(layer: nn.Module) -> tuple[list[Tensor], list[Looks]] | None:
    """Each group's weight and reach; None for a layer of another stride or output size."""
    if isinstance(layer, CompositeConv2d):
        weights, sides, groups = (
            list(layer.weights),
            list(layer.group_padding),
            max(layer.channel_groups, layer.groups),
        )
    elif type(layer) is nn.Conv2d:
        weights, groups = [layer.weight], layer.groups
        sides = [enclosing_padding(layer.padding, layer.kernel_size, layer.dilation)]  # type: ignore[arg-type]
    else:
        return None
    if groups > 1 or layer.padding_mode != "zeros" or tuple(layer.stride) != (1, 1):  # type: ignore[arg-type]
        return None
    found: list[Looks] = []
    for weight, both in zip(weights, sides, strict=True):
        axes = list(zip(weight.shape[2:], both, layer.dilation, strict=True))  # type: ignore[arg-type]
        rows, columns = ([step * tap - before for tap in range(size)] for size, (before, _), step in axes)
        if 0 not in rows or 0 not in columns or any(sum(pads) != step * (size - 1) for size, pads, step in axes):
            return None
        found.append((rows, columns))
    return [weight.detach() for weight in weights], found


class PackedConv2d(nn.Module):
    """A layer by minimal filtering, with its epilogue, for inference; `pack` lays out the weights once.

    It keeps the layer for exports, and packs again when weights are loaded.
    """

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        self.layer, self.epilogue = layer, epilogue or Epilogue()
        self.pack()
        self.register_load_state_dict_post_hook(_pack_again)

    def pack(self) -> None:
        weights, self.looks = weight_parts(self.layer) or ([], [])
        self.filters = [len(weight) for weight in weights]
        bias = self.layer.bias if isinstance(self.layer.bias, Tensor) else weights[0].new_zeros(sum(self.filters))
        self.register_buffer("bias", bias.detach().clone(), persistent=False)
        for index, (weight, look) in enumerate(zip(weights, self.looks, strict=True)):
            self.register_buffer(f"packed{index}", self.packed(weight, look), persistent=False)

    def packed(self, weight: Tensor, looks: Looks) -> Tensor:
        raise NotImplementedError

    @property
    def weights(self) -> list[Tensor]:
        return [self.get_buffer(f"packed{index}") for index in range(len(self.filters))]

    def plain(self) -> nn.Module:
        """The plain layer with its epilogue, for programs with their own kernels."""
        return BlockAsGiven(self.layer, self.epilogue).eval()

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]
        return self.run(x, residual)

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        raise NotImplementedError


def _pack_again(module: nn.Module, _: object) -> None:
    assert isinstance(module, PackedConv2d)
    module.pack()


# Winograd's F(4, 3) (Winograd 1980; Lavin and Gray 2016) in torch, along one axis: the axis of a kx1 or 1xk group,
# or the columns of a 3x3 group, whose three rows are summed before the output transform. A group of 1x1 filters is
# a plain product. Memory is channels-last, so the transforms (six inputs from six neighbours, four results from
# six products) work on whole rows of channels.

STEP, PRODUCTS = 4, 6
FEWEST = 32
"""With fewer channels the input transform takes longer than the saved products."""
FILTERS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
"""Six matrices out of three taps."""


class WinogradConv2d(PackedConv2d):
    """A layer of three taps along an axis."""

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        parts = weight_parts(layer)
        if parts is None or parts[0][0].shape[1] < FEWEST:
            return False
        axes = [_axis(looks) for looks in parts[1]]
        return None not in axes and any(axes)

    def packed(self, weight: Tensor, looks: Looks) -> Tensor:
        """[rows added, products, channels, filters] of a group, made in float64."""
        axis = _axis(looks)
        if not axis:
            return weight.flatten(1).t().contiguous()[None, None]
        taps = weight.double().permute(2, 3, 1, 0) if axis == 2 else weight.double().permute(3, 2, 1, 0)
        made = torch.einsum("pt,rtcf->rpcf", torch.tensor(FILTERS, dtype=torch.float64), taps)
        return made.to(weight.dtype).contiguous()

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        pixels = x.permute(0, 2, 3, 1).contiguous()
        y = pixels.new_empty(*pixels.shape[:3], sum(self.filters))
        biases = self.get_buffer("bias").split(self.filters)
        rows = max(len(matrices) for matrices in self.weights)
        inputs: dict[int, list[Tensor]] = {}
        groups = zip(self.looks, self.weights, y.split(self.filters, dim=3), biases, strict=True)
        for looks, matrices, target, bias in groups:
            axis = _axis(looks)
            if not axis:
                torch.add(pixels @ matrices[0, 0], bias, out=target)
                continue
            if axis not in inputs:
                inputs[axis] = _inputs(pixels, axis, rows // 2)
            products = _products(inputs[axis], matrices, pixels.shape[1] if axis == 2 else None)
            _write(target, products, bias, axis)
        return self.epilogue(y.permute(0, 3, 1, 2), residual)


def _axis(looks: Looks) -> int | None:
    """The axis of a group: 1 for rows, 2 for columns, 0 for a 1x1 filter; None for any other group."""
    rows, columns = looks
    if columns == THREE and rows in (THREE, [0]):
        return 2
    if rows == THREE and columns == [0]:
        return 1
    return 0 if rows == columns == [0] else None


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
    """Six products, summed over the rows of a group with several (`height` rows of results remain)."""
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


class StripConv2d(PackedConv2d):
    """A layer of 1x3 and 3x1 filters by compiled code (`kernels.strips`).

    The layer itself runs inputs of another type, and if the compiled code is not installed.
    """

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__(layer, epilogue)
        self.relu = self.epilogue.activation == "relu" and not self.epilogue.adds
        self.rest = replace(self.epilogue, activation=None) if self.relu else self.epilogue
        halves = self.rest.pool is not None and pool_name(self.rest.pool) in HALVING
        self.pools = halves and not self.rest.adds and self.rest.activation is None

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        parts = weight_parts(layer)
        if parts is None or not all(sorted(look, key=len) == [[0], THREE] for look in parts[1]):
            return False
        return parts[0][0].device.type == "cpu" and available(parts[0][0].dtype)

    def packed(self, weight: Tensor, looks: Looks) -> Tensor:
        return packed_strips(weight)

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        bias = self.get_buffer("bias")
        if x.dtype != bias.dtype or not available(x.dtype):
            return self.plain()(x, residual)
        across = [columns == THREE for _, columns in self.looks]
        pool = self.pools and x.shape[2] % 2 == x.shape[3] % 2 == 0
        y = strips(x, self.weights, bias, self.filters, across, self.relu, pool)
        return y if pool else self.rest(y, residual)


def has_strips(network: nn.Module) -> bool:
    """Whether a network has layers that compiled strips run, and these are installed."""
    return any(map(StripConv2d.takes, network.modules()))


def in_layers(model: nn.Module) -> nn.Module:
    """A copy with plain layers instead of our own CPU kernels, which other programs lack."""
    ours = (module for module in model.modules() if isinstance(module, PackedConv2d))
    return copy_with(model, {module: module.plain() for module in ours})


def as_given(block: Block) -> nn.Module:
    """The layer, then its epilogue."""
    return BlockAsGiven(block.layer, block.epilogue)


def epilogue_first(block: Block) -> nn.Module:
    """A conv, with the epilogue's pool before its activation."""
    return ByGroup([block.layer], block.epilogue)


def by_group(block: Block) -> nn.Module | None:
    """The epilogue before the concatenation, its pool before its activation; in a chain, for the last layer."""
    if not block.epilogue:
        return None
    *front, last = _stages(block.layer)
    convs = _split(last) if isinstance(last, CompositeConv2d) else [last]
    return Staged(front, ByGroup(convs, block.epilogue)) if convs else None


def merged(block: Block, way: Candidate = epilogue_first) -> nn.Module | None:
    """The whole layer as one dense conv, in one of the other ways."""
    dense = _dense(block.layer)
    return None if dense is None else way(replace(block, layer=dense))


def fused(block: Block) -> nn.Module | None:
    """On a GPU: one kernel per layer of a chain, the epilogue within the last."""
    return None if _on_cpu(block.layer) else FusedBlock.of(block.layer, block.epilogue)


def filtered(block: Block, kind: type[StripConv2d] | type[WinogradConv2d] = WinogradConv2d) -> nn.Module | None:
    """Rewrite the layers of a chain that a kind supports, and keep the others; None if it supports none."""
    stages = _stages(block.layer)
    if not _on_cpu(block.layer) or not any(map(kind.takes, stages)):
        return None
    *front, last = stages
    made = [kind(stage) if kind.takes(stage) else stage for stage in front]
    end = kind if kind.takes(last) else BlockAsGiven
    return Staged(made, end(last, block.epilogue))


def _stages(layer: nn.Module) -> list[nn.Module]:
    """The layers of a chain; for any other layer, the layer itself."""
    return list(layer) if isinstance(layer, FactoredConv2d) else [layer]


def _on_cpu(layer: nn.Module) -> bool:
    return next(layer.parameters()).device.type == "cpu"


def _dense(layer: nn.Module) -> nn.Module | None:
    """A chain or composite as one dense conv, if that is exact."""
    try:
        if isinstance(layer, FactoredConv2d):
            dense = merge_chain(layer)
        elif isinstance(layer, CompositeConv2d):
            dense = layer.dense_view()
        else:
            return None
    except InexactError:
        return None
    return laid_out_as(layer, dense).eval()


def _split(layer: CompositeConv2d) -> list[nn.Module]:
    """A conv per group, sharing the composite's weights; none if it does not pad with zeros.

    Also none for several groups with channel groups, whose outputs are not simply concatenated, and for depthwise
    filters, which see different channels.
    """
    if (
        layer.composite.depthwise
        or layer.padding_mode != "zeros"
        or layer.shuffle
        or (layer.channel_groups > 1 and len(layer.weights) > 1)
    ):
        return []
    biases = [None] * len(layer.weights) if layer.bias is None else layer.by_group(layer.bias)
    convs = []
    groups = zip(layer.composite.groups, layer.weights, biases, layer.group_padding, strict=True)
    for group, weight, bias, sides in groups:
        options = {"stride": layer.stride, "dilation": layer.dilation, "channel_groups": layer.channel_groups}
        with torch.device("meta"):
            conv = conv_of(layer.in_channels, Composite((group,)), padding=sides, bias=bias is not None, **options)
        if isinstance(conv, CompositeConv2d):
            conv.weights = nn.ParameterList([weight])
        else:
            conv.weight = weight  # type: ignore[assignment]
        conv.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
        convs.append(conv.eval())
    return convs


CANDIDATES: dict[str, Candidate] = {
    "as given": as_given,
    "by group": by_group,
    "merged": merged,
    "minimal filtering": filtered,
    "merged, minimal filtering": partial(merged, way=filtered),
    "compiled strips": partial(filtered, kind=StripConv2d),
    "fused": fused,
    "merged, fused": partial(merged, way=fused),
}
