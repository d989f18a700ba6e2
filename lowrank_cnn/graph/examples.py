"""Inputs on which a transformed network is compared with the original: the user's, or random ones that fit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import copied, is_finite, unchanged
from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.capture import CONVS
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.select import check_module

_SIZES = (32, 64, 28, 224, 299)
"""Common input heights and widths, in the order in which they are tried."""

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""An input, a tuple of all inputs by position, or a dictionary of all inputs by keyword."""


class Positional(nn.Module):
    """A network of keyword inputs, called by position."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names
        self.training = network.training

    def forward(self, *values: Any) -> Any:
        if len(values) != len(self.names):
            raise LowRankError(f"this network was made for {', '.join(self.names)}: give all of these.")
        return self.network(**dict(zip(self.names, values, strict=True)))


class ByKeyword(nn.Module):
    """A network called by position, for callers that give these inputs by keyword."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names
        self.eval()

    def forward(self, **named: Any) -> Any:
        return self.network(*in_order(self.names, named))


def in_order(names: tuple[str, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Keyword inputs by position; only those that the network was planned or optimised for."""
    if set(named) != set(names):
        known = ", ".join(names) or "inputs by position"
        raise LowRankError(f"this network was made for {known}, not for {', '.join(named) or 'no input'}.")
    return tuple(named[name] for name in names)


def by_position(model: nn.Module, example: Example) -> tuple[nn.Module, tuple[Any, ...], tuple[str, ...]]:
    """A network and its example inputs by position, and the keywords of these if they have any."""
    check_module(model)
    if isinstance(example, Mapping):
        names = tuple(map(str, example))
        return Positional(model, names), copied(*example.values()), names
    return model, copied(*(example if isinstance(example, tuple) else (example,))), ()


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of an example by position and by keyword: a tuple may end in a dictionary of keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple) and example and isinstance(example[-1], dict):
        return example[:-1], dict(example[-1])
    return (example if isinstance(example, tuple) else (example,)), {}


def in_signature(model: nn.Module, example: Any) -> tuple[Any, ...] | dict[str, Any]:
    """An example in the order of the forward's parameters; keyword-only parameters by keyword."""
    args, kwargs = arguments_of(example)
    if not kwargs:
        return args
    with explained("the network cannot be called with these inputs"):
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments) if bound.kwargs else bound.args


def example_for(model: nn.Module, given: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The inputs to compare on: those given, else random ones; None if no known input runs."""
    if given is not None:
        check_runs(model, *given)
        return copied(*given)
    tensors = (t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point())
    like = next(tensors, torch.zeros(()))
    for shape in _shapes(model):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        with suppress(LowRankError):
            check_runs(model, drawn)
            return (drawn,)
    return None


def check_runs(model: nn.Module, *example: Any) -> None:
    """Refuse, in a sentence, inputs on which the network fails or gives NaN or infinite values."""
    if not example:
        raise LowRankError("an example has at least one input.")
    for value in example:
        if not isinstance(value, Tensor):
            raise LowRankError(f"an example input is a tensor, not {type(value).__name__}.")
        if value.numel() == 0:
            raise LowRankError(f"an example input of {_shape(value)} is empty.")
    shapes = " and ".join(f"{_shape(value)}, {str(value.dtype).removeprefix('torch.')}" for value in example)
    with explained(f"the network does not run on an input of {shapes}"), torch.no_grad(), unchanged(model):
        result = model(*copied(*example))
    if not is_finite(result):
        raise LowRankError(
            "the network gives NaN or infinite values for the example input, so nothing can be compared with it: "
            "check its weights, or give another example."
        )


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "no dimensions"


def _shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The known size of the inputs, else sizes that the first layer could take."""
    if (size := notes(model).input_size) is not None:
        yield (2, *size)
        return
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield (2, module.in_features)
            return
        if isinstance(module, (*CONVS, CompositeConv2d)):
            axes = len(module.stride)
            for side in (16, 32, 64) if axes == 3 else _SIZES:
                yield (2, module.in_channels, *[side] * axes)
            return
