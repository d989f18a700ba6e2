"""The ways in which a block can be run. `CANDIDATES` is a table: another way is one more entry.

A candidate makes a module out of a block, or None where it does not apply; `plan` measures them all. The module
takes the block's input and, where the block adds one, its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import Block, BlockAsGiven, Epilogue, pattern_block
from lowrank_cnn.deploy.cpu_convs import MatrixConv2d, StripConv2d, WinogradConv2d
from lowrank_cnn.graph.capture import CaptureError, capture
from lowrank_cnn.graph.fused_between import fused_pool
from lowrank_cnn.graph.merge import InexactError, merge_chain
from lowrank_cnn.graph.patterns import find_patterns, rewritten
from lowrank_cnn.kernels.fused_convs import FrozenComposite, conv_options, pool_name
from lowrank_cnn.method.layers import CompositeConv2d, conv_of
from lowrank_cnn.method.rewrite import copy_with, laid_out_as
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.spec import Composite

# A block by the GPU kernels: filters, bias, residual, activation and max-pool in one launch.


class FusedBlock(nn.Module):
    """The layers of a block by the kernels; the last launch takes the epilogue.

    A pool that no conv kernel knows runs after it, by a kernel of its own where there is one.
    """

    def __init__(self, layers: Sequence[nn.Module], pool: nn.Module | None, epilogue: Epilogue) -> None:
        super().__init__()
        self.layers, self.pool, self.epilogue = nn.ModuleList(layers), pool, epilogue

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> FusedBlock | None:
        """A block of a conv, composite or chain; None where the kernels do not know one of its layers."""
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
    """Each filter group through the epilogue by itself, so that less is concatenated."""

    def __init__(self, convs: list[nn.Module], epilogue: Epilogue) -> None:
        super().__init__()
        self.convs, self.epilogue = nn.ModuleList(convs), epilogue
        self.filters = [int(conv.out_channels) for conv in convs]  # type: ignore[arg-type]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rest = [None] * len(self.filters) if residual is None else residual.split(self.filters, dim=-3)
        parts = [self.epilogue(conv(x), part) for conv, part in zip(self.convs, rest, strict=True)]
        return torch.cat(parts, dim=-3) if len(parts) > 1 else parts[0]


class GroupsApart(ByGroup):
    """The same step by step: a runtime fuses a conv with the activation right behind it, and has its own pools.

    A residual is added behind the concatenation. Every conv has a bias of its own: runtimes take constants alone.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self.epilogue.in_order(torch.cat([conv(x) for conv in self.convs], dim=-3), residual)
        return torch.cat([self.epilogue.in_order(conv(x)) for conv in self.convs], dim=-3)


def groups_apart(model: nn.Module) -> nn.Module:
    """A copy in which the groups of every composite are rectified and pooled before they are concatenated.

    The result is the same; a runtime that fuses a conv with the ReLU behind it can then do so. A network that
    cannot be captured stays as it is.
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


def in_layers(model: nn.Module) -> nn.Module:
    """A copy with plain layers in place of the products that a plan computes itself, which other programs lack."""
    ours = (
        module for module in model.modules() if isinstance(module, MatrixConv2d | StripConv2d | WinogradConv2d)
    )
    return copy_with(model, {module: module.plain() for module in ours})


def as_given(block: Block) -> nn.Module:
    """The layer, then its epilogue."""
    return BlockAsGiven(block.layer, block.epilogue)


def by_group(block: Block) -> nn.Module | None:
    """The epilogue before the concatenation, and its pool before its activation; of a chain, of its last layer."""
    if not block.epilogue:
        return None
    *front, last = _stages(block.layer)
    convs = _split(last) if isinstance(last, CompositeConv2d) else [last]
    return Staged(front, ByGroup(convs, block.epilogue)) if convs else None


def merged(block: Block) -> nn.Module | None:
    """The whole layer as one dense conv."""
    dense = _dense(block.layer)
    return None if dense is None else ByGroup([dense], block.epilogue)


def matrix_products(block: Block) -> nn.Module | None:
    """On the CPU: matrix products without patches or concatenation."""
    stages = _stages(block.layer)
    if not _on_cpu(block.layer) or not all(map(MatrixConv2d.takes, stages)):
        return None
    *front, last = stages
    return Staged([MatrixConv2d(stage) for stage in front], MatrixConv2d(last, block.epilogue))


def minimal_filtering(block: Block) -> nn.Module | None:
    """On the CPU: three taps by Winograd's F(4, 3), the other layers of a chain as they are."""
    return _filtered(block, WinogradConv2d)


def compiled_strips(block: Block) -> nn.Module | None:
    """On the CPU: 1x3 and 3x1 filters by compiled code, where it is installed; the other layers as they are."""
    return _filtered(block, StripConv2d)


def merged_and_filtered(block: Block) -> nn.Module | None:
    """On the CPU: the whole layer as one dense conv, by minimal filtering."""
    dense = _dense(block.layer)
    if dense is None or not _on_cpu(dense) or not WinogradConv2d.takes(dense):
        return None
    return WinogradConv2d(dense, block.epilogue)


def fused(block: Block) -> nn.Module | None:
    """On a GPU: one kernel per layer of a chain, the epilogue within the last."""
    return None if _on_cpu(block.layer) else FusedBlock.of(block.layer, block.epilogue)


def merged_and_fused(block: Block) -> nn.Module | None:
    """On a GPU: the whole layer as one dense conv, the epilogue within its kernel; nothing lies between."""
    dense = None if _on_cpu(block.layer) else _dense(block.layer)
    return None if dense is None else FusedBlock.of(dense, block.epilogue)


CANDIDATES: dict[str, Candidate] = {
    "as given": as_given,
    "by group": by_group,
    "merged": merged,
    "matrix products": matrix_products,
    "minimal filtering": minimal_filtering,
    "merged, minimal filtering": merged_and_filtered,
    "compiled strips": compiled_strips,
    "fused": fused,
    "merged, fused": merged_and_fused,
}


def _filtered(block: Block, kind: type[StripConv2d] | type[WinogradConv2d]) -> nn.Module | None:
    """The layers of a chain that a kind takes in that kind, the others as they are; None where it takes none."""
    stages = _stages(block.layer)
    if not _on_cpu(block.layer) or not any(map(kind.takes, stages)):
        return None
    *front, last = stages
    made = [kind(stage) if kind.takes(stage) else stage for stage in front]
    end = kind if kind.takes(last) else BlockAsGiven
    return Staged(made, end(last, block.epilogue))


def _stages(layer: nn.Module) -> list[nn.Module]:
    """The layers of a chain; any other layer alone."""
    return list(layer) if isinstance(layer, FactoredConv2d) else [layer]


def _on_cpu(layer: nn.Module) -> bool:
    return next(layer.parameters()).device.type == "cpu"


def _dense(layer: nn.Module) -> nn.Module | None:
    """A chain or composite as one dense conv, where that is exact."""
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
    """A conv per group, sharing the composite's weights; none where the padding is not of zeros.

    Nor where several groups meet several channel groups: their outputs are not simply one after the other.
    """
    if layer.padding_mode != "zeros" or layer.shuffle or (layer.channel_groups > 1 and len(layer.weights) > 1):
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
