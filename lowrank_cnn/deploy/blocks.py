"""A layer with the ReLU and the max-pool behind it: what is planned, and run, as one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.graph import successors
from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d

LAYERS = (nn.Conv2d, CompositeConv2d, FactoredConv2d)
_NOTHING = (nn.Identity, nn.Dropout)


@dataclass(frozen=True)
class Block:
    """A conv, composite or chain, and which of ReLU and max-pool follow; `rest` are their places by name."""

    name: str
    layer: nn.Module
    relu: bool = False
    pool: nn.MaxPool2d | None = None
    rest: tuple[str, ...] = ()

    @property
    def modules(self) -> list[nn.Module]:
        after = ([nn.ReLU()] if self.relu else []) + ([self.pool] if self.pool is not None else [])
        return [self.layer, *after]


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a network in evaluation; a layer used in several places is none."""
    after = successors(model)
    return [_block(model, name, layer, after) for name, layer in _layers(model)]


def finish(y: Tensor, *, relu: bool, pool: nn.MaxPool2d | None) -> Tensor:
    """Max-pool, then ReLU in place: the order does not matter to the result, but fewer values are rectified."""
    y = y if pool is None else max_pool(y, pool)
    return y.relu_() if relu else y


def max_pool(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """A max-pool; 2x2 windows side by side as two maxima of slices, which vectorise where torch's own do not."""
    even = all(size % 2 == 0 for size in x.shape[-2:])
    if x.is_cuda or not _is_halving(pool) or not even:
        return pool(x)
    rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])


def _is_halving(pool: nn.Module) -> bool:
    if not isinstance(pool, nn.MaxPool2d):  # one that knows the kernels
        return False
    return [_both(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)] == [
        (2, 2), (2, 2), (0, 0), (1, 1),
    ]  # fmt: skip


def _both(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    places: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[id(module)] = places.get(id(module), 0) + 1
    inside = {id(part) for m in model.modules() if isinstance(m, FactoredConv2d) for part in list(m.modules())[1:]}
    for name, module in model.named_modules():
        if type(module) in LAYERS and id(module) not in inside and places[id(module)] == 1:
            yield name, module


def _block(model: nn.Module, name: str, layer: nn.Module, after: dict[str, str]) -> Block:
    relu, pool, rest, here = False, None, [], name
    while here in after:
        here = after[here]
        module = model.get_submodule(here)
        if type(module) is nn.ReLU and not relu:
            relu = True
        elif type(module) is nn.MaxPool2d and pool is None and not module.return_indices:
            pool = module
        elif not isinstance(module, _NOTHING):
            break
        rest.append(here)
    return Block(name, layer, relu, pool, tuple(rest))
