"""Blocks: a layer with the residual, the activation and the max-pool after it, planned and run as one.

Every way to run a block ends with its `Epilogue`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.graph.capture import InputKind, NetworkGraph, capture, kind_of, layer_kind
from lowrank_cnn.graph.patterns import Pattern, find_patterns, rewritten
from lowrank_cnn.kernels.fused_convs import pool_name
from lowrank_cnn.kernels.problem import activate, is_monotone
from lowrank_cnn.method.rewrite import copy_with

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
            y = max_pool(self._added(y, residual), self.pool)  # first, which leaves fewer values to activate
            return self._activated(y)
        y = self._summed(y, residual)
        return y if self.pool is None else max_pool(y, self.pool)

    def in_order(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same step by step, by torch's own operations."""
        y = self._summed(y, residual)
        return y if self.pool is None else self.pool(y)

    def _summed(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Sum and activation in their order."""
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
        named = ["add"] if self.adds else []
        activation = [self.activation] if self.activation is not None else []
        named = [*activation, *named] if self.add_last else [*named, *activation]
        return " + ".join([*named, *([str(self.pool)] if self.pool is not None else [])])


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


class ForCalls(nn.Module):
    """A rewritten network for the kind of call that was captured; the original runs all others.

    The original also runs calls by keyword.
    """

    def __init__(self, rewritten: nn.Module, original: nn.Module, calls: tuple[InputKind | None, ...]) -> None:
        super().__init__()
        self.rewritten, self.original, self.calls = rewritten, original, calls

    def forward(self, *inputs: Any, **options: Any) -> object:
        fits = len(inputs) == len(self.calls) and not options
        if fits and all(_fits(x, kind) for x, kind in zip(inputs, self.calls, strict=True)):
            return self.rewritten(*inputs)
        return self.original(*inputs, **options)


def _fits(x: Any, kind: InputKind | None) -> bool:
    return isinstance(x, Tensor) and (kind is None or kind_of(x) == kind)


def in_blocks(model: nn.Module, *inputs: Any) -> tuple[fx.GraphModule, list[Block], NetworkGraph]:
    """A copy of a network as a graph in which each block is one module, under the name of its layer.

    It is valid for calls with inputs of this kind (`NetworkGraph.calls`). Raises `CaptureError` if the network
    cannot be captured.
    """
    copied = copy_with(model)
    captured = capture(nn.Sequential(copied).eval() if layer_kind(model) else copied, *inputs).complete()
    patterns = [
        pattern
        for pattern in find_patterns(captured)
        if not isinstance(captured.root.get_submodule(pattern.name), nn.Conv1d)  # which has one way to run
    ]
    blocks = [pattern_block(captured, pattern) for pattern in patterns]
    made = dict(zip([pattern.name for pattern in patterns], blocks, strict=True))
    network = rewritten(
        captured, patterns, lambda p: BlockAsGiven(made[p.name].layer, made[p.name].epilogue).eval()
    )
    return network.eval(), blocks, captured


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


def pattern_block(captured: NetworkGraph, pattern: Pattern) -> Block:
    """The layer of a pattern, with its epilogue."""
    layer = captured.root.get_submodule(pattern.name)
    adds = pattern.add is not None
    return Block(pattern.name, layer, Epilogue(pattern.activation, pattern.pool, adds, pattern.add_last))
