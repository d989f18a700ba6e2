"""Blocks (a layer with the residual, the activation and the max-pool after it), and the ways to run them.

Every way ends with the block's `Epilogue`. `CANDIDATES` is a table: another way is one more entry. A candidate
makes a module out of a block, or None if it does not apply; `plan` measures them all. The module takes the block's
input and, if the block adds one, its residual. `GroupsApart` is for engines, which fuse by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.core.compare import tensors_of
from lowrank_cnn.graph.bands import FusedBands, fused_bands
from lowrank_cnn.graph.capture import CaptureError, InputKind, NetworkGraph, capture, kind_of, layer_kind
from lowrank_cnn.graph.fused_between import fused_pool
from lowrank_cnn.graph.merge import InexactError, merge_chain, rescaled
from lowrank_cnn.graph.patterns import LAYERS, Pattern, factors, find_patterns, rewritten
from lowrank_cnn.graph.pointwise import linear_as_convs
from lowrank_cnn.kernels.depthwise.dispatch import MOST_TAPS
from lowrank_cnn.kernels.device import kernels_run
from lowrank_cnn.kernels.dispatch import may_fuse
from lowrank_cnn.kernels.fused_convs import FrozenComposite, conv_options, pool_name
from lowrank_cnn.kernels.problem import activate, is_monotone
from lowrank_cnn.kernels.strips import available, packed_strips, strips
from lowrank_cnn.method.layers import CompositeConv2d, Sides, conv_of, enclosing_padding
from lowrank_cnn.method.rewrite import copy_with, laid_out_as
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.spec import Composite, Kernel

HALVING = ("floor", "ceil")
"""Max-pools of disjoint 2x2 windows, as `pool_name` calls them."""


@dataclass(frozen=True)
class Epilogue:
    """The operations after a layer: a sum with a residual (if `adds`), an activation, a max-pool, in this order.

    With `add_last` the sum follows the activation, as in Darknet.
    Activations are named as in `problem.ACTIVATIONS`: "relu", "leaky_relu:0.1", "silu", "gelu", "hardswish".
    """

    activation: str | None = None
    pool: nn.MaxPool2d | None = None
    adds: bool = False
    add_last: bool = False

    def __call__(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """Finish a result. It may be overwritten, because nothing else refers to it."""
        if self.pool is not None and is_monotone(self.activation) and not self.add_last:
            # The pool comes first, which leaves fewer values to activate.
            return self._activated(max_pool(self._added(y, residual), self.pool))
        y = self._summed(y, residual)
        return y if self.pool is None else max_pool(y, self.pool)

    def in_order(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same step by step, by torch's own operations."""
        y = self._summed(y, residual)
        return y if self.pool is None else self.pool(y)

    def _summed(self, y: Tensor, residual: Tensor | None) -> Tensor:
        if self.add_last:
            return self._added(self._activated(y), residual)
        return self._activated(self._added(y, residual))

    def _added(self, y: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return y
        in_place = y.shape == residual.shape and y.dtype == residual.dtype and not y.requires_grad
        return y.add_(residual) if in_place else y + residual

    def _activated(self, y: Tensor) -> Tensor:
        return activate(y, self.activation, inplace=not y.requires_grad)

    def __bool__(self) -> bool:
        return self.adds or self.activation is not None or self.pool is not None

    def __str__(self) -> str:
        named = ["add" if self.adds else "", self.activation or ""]
        named = [*(reversed(named) if self.add_last else named), "" if self.pool is None else str(self.pool)]
        return " + ".join(filter(None, named))


@dataclass(frozen=True)
class Block:
    """A conv, composite or chain of a network, by name, with its epilogue."""

    name: str
    layer: nn.Module
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __str__(self) -> str:
        return " + ".join(filter(None, (str(self.layer), str(self.epilogue))))


class BlockAsGiven(nn.Module):
    """A block run by its own layer, the epilogue after it."""

    def __init__(self, layer: nn.Module, epilogue: Epilogue) -> None:
        super().__init__()
        self.layer, self.epilogue = layer, epilogue

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.epilogue.in_order(self.layer(x), residual)

    def extra_repr(self) -> str:
        return str(self.epilogue)


class BandsBlock(BlockAsGiven):
    """A depthwise layer in one launch with the activation and then the residual after it; else as given."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        after, layer = self.epilogue, self.layer
        if after.pool is None and (residual is None or after.add_last or after.activation is None):
            how = {"activation": after.activation, "residual": residual}
            if (y := layer.in_one_pass(x, **how)) is not None:  # type: ignore[operator]
                return y
        return super().forward(x, residual)

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> BandsBlock | None:
        """A block of a depthwise layer; None for others."""
        own = fused_bands(layer) or layer
        depthwise = isinstance(own, FusedBands) or (isinstance(own, CompositeConv2d) and own.composite.depthwise)
        return cls(own, epilogue).eval() if depthwise else None


class ForCalls(nn.Module):
    """The rewritten network for calls of the captured kind; the original for all others, also by keyword."""

    def __init__(self, rewritten: nn.Module, original: nn.Module, calls: tuple[InputKind | None, ...]) -> None:
        super().__init__()
        self.rewritten, self.original, self.calls = rewritten, original, calls

    def forward(self, *inputs: Any, **options: Any) -> object:
        kinds = zip(inputs, self.calls, strict=False)
        tensors = all(isinstance(x, Tensor) and (kind is None or kind_of(x) == kind) for x, kind in kinds)
        if tensors and len(inputs) == len(self.calls) and not options:
            return self.rewritten(*inputs)
        return self.original(*inputs, **options)


def in_blocks(model: nn.Module, *inputs: Any) -> tuple[fx.GraphModule, dict[str, Block], NetworkGraph]:
    """A copy as a graph in which each block is one module, under the name of its layer; the blocks by name."""
    copied = copy_with(model)
    captured = capture(nn.Sequential(copied).eval() if layer_kind(model) else copied, *inputs).complete()
    if all(map(may_fuse, tensors_of(inputs))):
        linear_as_convs(captured)
    # A 1-D conv has one way to run.
    blocks = {key: block for key, block in _blocks(captured).items() if not isinstance(block.layer, nn.Conv1d)}
    network = rewritten(captured, {pattern: as_given(block).eval() for pattern, block in blocks.items()})
    return network.eval(), {block.name: block for block in blocks.values()}, captured


def _blocks(captured: NetworkGraph) -> dict[Pattern, Block]:
    found = {}
    for pattern in find_patterns(captured, scales=True, kinds=(*LAYERS, "bands")):
        layer, adds = captured.root.get_submodule(pattern.name), pattern.add is not None
        if pattern.scale is not None:
            scale = factors(captured, pattern.nodes[0], pattern.scale)
            assert scale is not None
            layer = laid_out_as(layer, rescaled(copy.deepcopy(layer).cpu().double(), scale.cpu().double())).eval()
        epilogue = Epilogue(pattern.activation, pattern.pool, adds, pattern.add_last)
        found[pattern] = Block(pattern.name, layer, epilogue)
    return found


def as_network(network: nn.Module, captured: NetworkGraph, original: nn.Module) -> nn.Module:
    """A network for every call: the rewritten one for the captured kind of call, the original for others."""
    return network if captured.calls is None else ForCalls(network, original, captured.calls).eval()


def max_pool(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """A max-pool; for disjoint 2x2 windows two maxima of slices, which vectorise, unlike torch's own."""
    even = all(size % 2 == 0 for size in x.shape[-2:])
    if x.is_cuda or not even or pool_name(pool) not in HALVING:
        return pool(x)
    rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])


class FusedBlock(nn.Module):
    """The layers of a block by the kernels; the last launch includes the epilogue, but for pools it lacks."""

    def __init__(self, layers: Sequence[nn.Module], pool: nn.Module | None, epilogue: Epilogue) -> None:
        super().__init__()
        self.layers, self.pool, self.epilogue = nn.ModuleList(layers), pool, epilogue

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> FusedBlock | None:
        """A block of a conv, composite or chain; None if the kernels do not support one of its layers."""
        stages = _stages(layer)
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

    def __init__(self, front: Sequence[nn.Module], last: nn.Module) -> None:
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
    """The same step by step: a runtime fuses a conv with the activation right after it, and has its own pools."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self.epilogue.in_order(torch.cat([conv(x) for conv in self.convs], dim=self.axis), residual)
        return torch.cat([self.epilogue.in_order(conv(x)) for conv in self.convs], dim=self.axis)


def groups_apart(model: nn.Module) -> nn.Module:
    """A copy in which composites are rectified and pooled by group; a network that cannot be captured stays."""
    try:
        captured = capture(copy_with(model)).complete()
    except CaptureError:
        return model
    made: dict[Pattern, nn.Module] = {}
    for pattern, block in _blocks(captured).items():
        *front, last = map(_apart, _stages(block.layer))
        if any(len(convs) > 1 for convs in (*front, last)):
            before = [GroupsApart(convs, Epilogue()) for convs in front]
            made[pattern] = Staged(before, GroupsApart(last, block.epilogue)).eval()
    return rewritten(captured, made).eval() if made else model


def _apart(layer: nn.Module) -> list[nn.Module]:
    """The convs of a layer's groups: their biases are then constants, which not every engine can split."""
    if not isinstance(layer, CompositeConv2d) or len(layer.weights) == 1:
        return [layer]
    return _split(layer) or [layer]


# Layers of 1x3 and 3x1 filters on the CPU, by compiled code.

_AROUND: dict[Kernel, Sides] = {(1, 3): ((0, 0), (1, 1)), (3, 1): ((1, 1), (0, 0))}
"""The padding with which a strip keeps the size of its input."""


def _strip_weights(layer: nn.Module) -> list[Tensor]:
    """The weights of a layer whose filters are all 1x3 or 3x1 and keep the size; empty for any other layer."""
    if isinstance(layer, CompositeConv2d):
        weights, sides, groups = list(layer.weights), layer.group_padding, max(layer.channel_groups, layer.groups)
    elif type(layer) is nn.Conv2d:
        weights, groups = [layer.weight], layer.groups
        sides = (enclosing_padding(layer.padding, layer.kernel_size, layer.dilation),)  # type: ignore[arg-type]
    else:
        return []
    plain = groups == 1 and layer.padding_mode == "zeros" and layer.stride == layer.dilation == (1, 1)
    kept = plain and all(_AROUND.get(tuple(w.shape[2:])) == own for w, own in zip(weights, sides, strict=True))
    return [weight.detach() for weight in weights] if kept else []


class StripConv2d(nn.Module):
    """A layer of 1x3 and 3x1 filters by compiled code (`kernels.strips`), with its epilogue, for inference.

    It keeps the layer for exports, for inputs of another type, and for machines without the compiled code. The
    weights are packed once, and again when weights are loaded.
    """

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        self.layer, self.epilogue = layer, epilogue or Epilogue()
        self.relu = self.epilogue.activation == "relu" and not self.epilogue.adds
        self.rest = replace(self.epilogue, activation=None) if self.relu else self.epilogue
        halves = self.rest.pool is not None and pool_name(self.rest.pool) in HALVING
        self.pools = halves and not self.rest.adds and self.rest.activation is None
        self.pack()
        self.register_load_state_dict_post_hook(StripConv2d.pack)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        weights = _strip_weights(layer)
        return bool(weights) and weights[0].device.type == "cpu" and available(weights[0].dtype)

    def pack(self, _: object = None) -> None:
        weights = _strip_weights(self.layer)
        self.filters, self.across = [len(w) for w in weights], [w.shape[3] == 3 for w in weights]
        bias = self.layer.bias if isinstance(self.layer.bias, Tensor) else weights[0].new_zeros(sum(self.filters))
        self.register_buffer("bias", bias.detach().clone(), persistent=False)
        for index, weight in enumerate(weights):
            self.register_buffer(f"packed{index}", packed_strips(weight), persistent=False)

    def plain(self) -> nn.Module:
        """The plain layer with its epilogue, for programs with their own kernels."""
        return BlockAsGiven(self.layer, self.epilogue).eval()

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]
        bias = self.get_buffer("bias")
        if x.dtype != bias.dtype or not available(x.dtype):
            return self.plain()(x, residual)
        weights = [self.get_buffer(f"packed{index}") for index in range(len(self.filters))]
        pool = self.pools and x.shape[2] % 2 == x.shape[3] % 2 == 0
        y = strips(x, weights, bias, self.filters, self.across, self.relu, pool)
        return y if pool else self.rest(y, residual)


def has_strips(network: nn.Module) -> bool:
    """Whether a network has layers that compiled strips run, and these are installed."""
    return any(map(StripConv2d.takes, network.modules()))


def in_layers(model: nn.Module) -> nn.Module:
    """A copy with plain layers instead of our own CPU kernels, which other programs lack."""
    ours = (module for module in model.modules() if isinstance(module, StripConv2d))
    return copy_with(model, {module: module.plain() for module in ours})


def as_given(block: Block) -> nn.Module:
    return BlockAsGiven(block.layer, block.epilogue)


def by_group(block: Block) -> nn.Module | None:
    """The epilogue before the concatenation, its pool before its activation; in a chain, for the last layer."""
    if not block.epilogue:
        return None
    *front, last = _stages(block.layer)
    convs = _split(last) if isinstance(last, CompositeConv2d) else [last]
    return Staged(front, ByGroup(convs, block.epilogue)) if convs else None


def merged(block: Block, *, by_kernel: bool = False) -> nn.Module | None:
    """The whole layer as one dense conv, if exact: fused, or with the epilogue's pool before its activation."""
    layer, dense = block.layer, None
    with suppress(InexactError):
        if isinstance(layer, FactoredConv2d):
            dense = merge_chain(layer)
        elif isinstance(layer, CompositeConv2d) and not _in_one_pass(layer):
            dense = layer.dense_view()
    if dense is None:
        return None
    dense = laid_out_as(layer, dense).eval()
    return fused(replace(block, layer=dense)) if by_kernel else ByGroup([dense], block.epilogue)


def fused(block: Block) -> nn.Module | None:
    """On a GPU: one kernel per layer of a chain, the epilogue within the last."""
    if _on_cpu(block.layer):
        return None
    return BandsBlock.of(block.layer, block.epilogue) or FusedBlock.of(block.layer, block.epilogue)


def by_strips(block: Block) -> nn.Module | None:
    """On the CPU: the layers of a chain that are strips by compiled code; None if there are none."""
    stages = _stages(block.layer)
    if not any(map(StripConv2d.takes, stages)):
        return None
    *front, last = stages
    made = [StripConv2d(stage) if StripConv2d.takes(stage) else stage for stage in front]
    end = StripConv2d if StripConv2d.takes(last) else BlockAsGiven
    return Staged(made, end(last, block.epilogue))


def _stages(layer: nn.Module) -> list[nn.Module]:
    return list(layer) if isinstance(layer, FactoredConv2d) else [layer]


def _on_cpu(layer: nn.Module) -> bool:
    return next(layer.parameters()).device.type == "cpu"


def _in_one_pass(layer: CompositeConv2d) -> bool:
    """Whether a kernel of ours runs all bands. Torch's depthwise convs of their size take many times as long."""
    taps = max((group.taps for group in layer.composite.groups), default=0)
    runs = taps <= MOST_TAPS and kernels_run(next(layer.parameters()).device, depthwise=True)
    return layer.composite.depthwise and layer.padding_mode == "zeros" and runs


def _split(layer: CompositeConv2d) -> list[nn.Module]:
    """A conv per group, sharing the weights; none if they cannot be convs whose results are just concatenated."""
    several = layer.channel_groups > 1 and len(layer.weights) > 1
    if layer.composite.depthwise or layer.padding_mode != "zeros" or layer.shuffle or several:
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
    "compiled strips": by_strips,
    "fused": fused,
    "merged, fused": partial(merged, by_kernel=True),
}
