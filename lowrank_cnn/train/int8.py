"""Train a network as int8 will run it: layers round their inputs and weights in the forward pass.

Weights have 255 levels per output channel, symmetric about zero; inputs have 256 levels over the range that
training sees, one range for a layer. Inputs of average pools are rounded likewise. Folding a batch norm scales the
channels of a weight together with its levels, so an int8 file rounds the same values after folding.
Gradients pass through the rounding unchanged, and are zero where a value lies outside its range (the
straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, to_caller
from lowrank_cnn.core.modules import first_input
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.shaped_layers import ShapedConv2d
from lowrank_cnn.models.network import GlobalAveragePool
from lowrank_cnn.train.recipe import Recipe

Ranges = Mapping[str, tuple[float, float]]
"""The least and largest input of each layer that int8 represents."""
ROUNDED_LAYERS = (nn.Conv2d, nn.Linear, CompositeConv2d)
ROUNDED_INPUTS = (*ROUNDED_LAYERS, nn.AvgPool2d, nn.AdaptiveAvgPool2d, GlobalAveragePool)
"""Modules whose input is rounded: an int8 file rounds what average pools read, too."""
WEIGHT_LEVELS, INPUT_LEVELS = 127, 255
SLOWEST = 0.01
"""How much the newest batch counts in a range after the first hundred, which all count equally."""
_RANGE = "_int8_range"


@contextmanager
def trained_in_int8(network: nn.Module, recipe: Recipe, *, processes: int = 1) -> Iterator[None]:
    """Within the block, all convs, linear layers and average pools round as int8 does, if the recipe says so."""
    if recipe.quantize == "none":
        yield
        return
    if processes > 1:
        raise LowRankError("quantize trains in one process: start it without torchrun, on one device.")
    if any(isinstance(layer, ShapedConv2d) for layer in network.modules()):
        raise LowRankError("learn shapes first, then train the network that they give with quantize.")
    if any(isinstance(layer, BranchedConv2d) for layer in network.modules()):
        raise LowRankError(
            "strips and their branches become one layer, which int8 rounds: quantise the trained network instead "
            f"({to_caller('lr.quantize', 'lowrank export --precision int8')})."
        )
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, ROUNDED_INPUTS)}
    if not any(isinstance(layer, ROUNDED_LAYERS) for layer in layers.values()):
        raise LowRankError("quantize is for convs and linear layers, and this network has none.")
    device = next(network.parameters()).device
    with ExitStack() as attached:
        for layer in layers.values():
            attached.enter_context(rounding(layer, device))
        yield


@contextmanager
def rounded_by(network: nn.Module, ranges: Ranges) -> Iterator[nn.Module]:
    """Within the block, the layers that have a range round as int8 does, with that range; no gradients then."""
    layers, device = dict(network.named_modules()), next(network.parameters()).device
    with ExitStack() as attached, torch.no_grad():
        for name, ends in ranges.items():
            if isinstance(layers.get(name), ROUNDED_INPUTS):
                attached.enter_context(rounding(layers[name], device))[:2] = torch.tensor(ends)
        yield network


def range_states(network: nn.Module) -> dict[str, Tensor]:
    """(low, high, batches seen) of each layer that rounds now, which training updates in place."""
    states = ((name, getattr(layer, _RANGE, None)) for name, layer in network.named_modules())
    return {name: state for name, state in states if state is not None}


def ranges_of(states: Mapping[str, Tensor]) -> Ranges:
    """The range of each layer that has run in training, on the grid of int8."""
    rows = {name: state.tolist() for name, state in states.items()}
    return {name: on_grid(low, high) for name, (low, high, seen) in rows.items() if seen}


def widen(ranges: MutableMapping[Any, tuple[float, float]], key: Any, ends: tuple[float, float]) -> None:
    """Enter a range; a tensor that several layers read has one range, which contains those of all."""
    low, high = ranges.get(key, ends)
    ranges[key] = min(low, ends[0]), max(high, ends[1])


def on_grid(low: float, high: float) -> tuple[float, float]:
    """A range with zero among its 256 levels."""
    step, zero = (value.item() for value in _grid(torch.tensor([low, high])))
    return -zero * step, (INPUT_LEVELS - zero) * step


@contextmanager
def rounding(layer: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Within the block, a layer rounds its input and weights; yields (low, high, batches seen), on the device.

    The range is that of the inputs so far, observed wherever gradients are recorded.
    """
    state = torch.zeros(3, device=device)
    # A buffer follows the network to another device, and an interrupted step restores it.
    layer.register_buffer(_RANGE, state, persistent=False)
    rounds = layer.register_forward_pre_hook(_round, with_kwargs=True)
    try:
        with rounds, layer.register_forward_hook(_put_back, always_call=True):
            yield state
    finally:
        _put_back(layer)
        del layer._buffers[_RANGE]
        layer._non_persistent_buffers_set.discard(_RANGE)


def _round(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    state, x = getattr(layer, _RANGE), first_input(args, kwargs)
    if torch.is_grad_enabled():
        observe(state, x)
    # An entry of __dict__ hides the parameter, which keeps its name, its values and its gradients.
    if isinstance(layer, CompositeConv2d):
        layer.__dict__["weights"] = [rounded_weight(weight) for weight in layer.weights]
    elif isinstance(layer, ROUNDED_LAYERS):
        layer.__dict__["weight"] = rounded_weight(layer.weight)  # type: ignore[arg-type]
    values = [rounded_input(x, state), *(*args, *kwargs.values())[1:]]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _put_back(layer: nn.Module, *_: object) -> None:
    for name in ("weights", "weight"):
        layer.__dict__.pop(name, None)


@torch.no_grad()
def observe(state: Tensor, x: Tensor) -> None:
    """Move a range towards that of a batch: an average over the first hundred batches, then an exponential one."""
    found = torch.stack(torch.aminmax(x.detach().float()))
    share = (1 / (state[2] + 1)).clamp_min(SLOWEST)
    state[:2].lerp_(found, share)
    state[2] += 1


def rounded_input(x: Tensor, state: Tensor) -> Tensor:
    """An input on the 256 levels of its range."""
    step, zero = _grid(state)
    inside = x.float().clamp(-zero * step, (INPUT_LEVELS - zero) * step)
    return _straight_through(inside, (inside / step).round() * step).to(x.dtype)


def rounded_weight(weight: Tensor) -> Tensor:
    """A weight on 255 levels per output channel, from minus to plus its largest value."""
    most = weight.detach().float().abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True)
    step = most.clamp_min(1e-12) / WEIGHT_LEVELS
    return _straight_through(weight, (weight / step).round() * step).to(weight.dtype)


def _straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value with the gradient of the other."""
    return value + (rounded - value).detach()


def _grid(state: Tensor) -> tuple[Tensor, Tensor]:
    """The step and the zero point of a range, which is widened to contain zero."""
    low, high = state[0].clamp_max(0), state[1].clamp_min(0)
    step = (high - low).clamp_min(1e-12) / INPUT_LEVELS
    return step, (-low / step).round().clamp(0, INPUT_LEVELS)
