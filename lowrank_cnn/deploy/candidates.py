"""The ways in which a block can be run. `CANDIDATES` is a table: another way is one more entry.

A candidate makes a module out of a block, or None where it does not apply; `plan` measures them all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import Block, find_blocks, finish
from lowrank_cnn.deploy.chains import InexactError, merge_chain
from lowrank_cnn.deploy.matrix import MatrixConv2d
from lowrank_cnn.deploy.winograd import WinogradConv2d
from lowrank_cnn.method.converting import copy_with, laid_out_as
from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d, conv_of
from lowrank_cnn.method.spec import Composite

Candidate = Callable[[Block], nn.Module | None]


class ByGroup(nn.Module):
    """Each filter group through the max-pool and the ReLU by itself, so that less is concatenated."""

    def __init__(self, convs: list[nn.Module], *, relu: bool, pool: nn.MaxPool2d | None) -> None:
        super().__init__()
        self.convs, self.relu, self.pool = nn.ModuleList(convs), relu, pool

    def forward(self, x: Tensor) -> Tensor:
        parts = [finish(conv(x), relu=self.relu, pool=self.pool) for conv in self.convs]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


class Apart(nn.Module):
    """Each filter group with a ReLU and a max-pool of its own, as modules that other runtimes fuse."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def groups_apart(model: nn.Module) -> nn.Module:
    """A copy in which the groups of every composite are rectified and pooled before they are concatenated.

    The result is the same; a runtime that fuses a conv with the ReLU behind it can then do so.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for block in find_blocks(model):
        *front, last = block.layer if isinstance(block.layer, FactoredConv2d) else [block.layer]
        convs = _split(last) if isinstance(last, CompositeConv2d) and len(last.weights) > 1 else []
        if convs:
            apart = Apart([nn.Sequential(conv, *block.modules[1:]) for conv in convs])
            replaced[block.layer] = nn.Sequential(*front, apart).eval()
            replaced |= {model.get_submodule(name): nn.Identity().eval() for name in block.rest}
    return copy_with(model, replaced)


def in_layers(model: nn.Module) -> nn.Module:
    """A copy whose convs are layers again where a plan has products of its own, which other programs lack."""
    ours = (module for module in model.modules() if isinstance(module, MatrixConv2d | WinogradConv2d))
    return copy_with(model, {module: module.plain() for module in ours})


def as_given(block: Block) -> nn.Module:
    """The layer, its ReLU and its pool, one after the other."""
    return nn.Sequential(*block.modules)


def by_group(block: Block) -> nn.Module | None:
    """Pool and ReLU before the concatenation; of a chain, of its last layer."""
    if not block.relu and block.pool is None:
        return None
    *front, last = block.layer if isinstance(block.layer, FactoredConv2d) else [block.layer]
    convs = _split(last) if isinstance(last, CompositeConv2d) else [last]
    return nn.Sequential(*front, ByGroup(convs, relu=block.relu, pool=block.pool)) if convs else None


def merged(block: Block) -> nn.Module | None:
    """The whole layer as one dense conv."""
    dense = _dense(block.layer)
    return None if dense is None else ByGroup([dense], relu=block.relu, pool=block.pool)


def matrix_products(block: Block) -> nn.Module | None:
    """On the CPU: matrix products without patches or concatenation."""
    stages = list(block.layer) if isinstance(block.layer, FactoredConv2d) else [block.layer]
    if next(block.layer.parameters()).device.type != "cpu" or not all(map(MatrixConv2d.takes, stages)):
        return None
    *front, last = stages
    return nn.Sequential(*map(MatrixConv2d, front), MatrixConv2d(last, relu=block.relu, pool=block.pool))


def minimal_filtering(block: Block) -> nn.Module | None:
    """On the CPU: three taps by Winograd's F(4, 3), the other layers of a chain as they are."""
    stages = list(block.layer) if isinstance(block.layer, FactoredConv2d) else [block.layer]
    if next(block.layer.parameters()).device.type != "cpu" or not any(map(WinogradConv2d.takes, stages)):
        return None
    *front, last = stages
    made = [WinogradConv2d(stage) if WinogradConv2d.takes(stage) else stage for stage in front]
    if WinogradConv2d.takes(last):
        return nn.Sequential(*made, WinogradConv2d(last, relu=block.relu, pool=block.pool))
    return nn.Sequential(*made, last, *block.modules[1:])


def merged_and_filtered(block: Block) -> nn.Module | None:
    """On the CPU: the whole layer as one dense conv, by minimal filtering."""
    dense = _dense(block.layer)
    if dense is None or next(dense.parameters()).device.type != "cpu" or not WinogradConv2d.takes(dense):
        return None
    return WinogradConv2d(dense, relu=block.relu, pool=block.pool)


def fused(block: Block) -> nn.Module | None:
    """On a GPU: one kernel per layer of a chain for filters and bias, ReLU and pool within the last."""
    if not next(block.layer.parameters()).is_cuda:
        return None
    from lowrank_cnn.kernels.fuse import freeze

    return freeze(as_given(block))


def merged_and_fused(block: Block) -> nn.Module | None:
    """On a GPU: the whole layer as one dense conv, ReLU and pool within its kernel; nothing lies between."""
    dense = _dense(block.layer) if next(block.layer.parameters()).is_cuda else None
    if dense is None:
        return None
    from lowrank_cnn.kernels.fuse import freeze

    return freeze(nn.Sequential(dense, *block.modules[1:]))


CANDIDATES: dict[str, Candidate] = {
    "as given": as_given,
    "by group": by_group,
    "merged": merged,
    "matrix products": matrix_products,
    "minimal filtering": minimal_filtering,
    "merged, minimal filtering": merged_and_filtered,
    "fused": fused,
    "merged, fused": merged_and_fused,
}


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
    if layer.padding_mode != "zeros" or (layer.channel_groups > 1 and len(layer.weights) > 1):
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
