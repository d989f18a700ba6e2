"""How long the layers of a network take alone on a GPU. A compiler that calls the same layers is hardly faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.network_graph import first_input, layer_kind
from lowrank_cnn.system.clock import measure

Call = tuple[nn.Module, Tensor]


def time_layers(network: nn.Module, *inputs: Any, repeats: int = 5) -> float:
    """Milliseconds of all convs, linear layers and composites, one after the other in one CUDA graph.

    A pass over the maps of each is included: the compiler writes one for the bias, sum or ReLU that follows.
    """
    calls = layer_calls(network, *inputs)
    with torch.inference_mode(False), torch.no_grad():
        graph = captured(lambda: [_and_one_pass(layer(x)) for layer, x in calls])
    return measure({"layers": graph.replay}, repeats=repeats, cuda=True)["layers"].ms


def _and_one_pass(maps: Tensor) -> Tensor:
    return maps.relu() if maps.dim() == 4 else maps


def layer_calls(network: nn.Module, *inputs: Any) -> list[Call]:
    """Every call of a layer with an input of the size that it gets; calls of one size share their input."""
    shared: dict[Any, Tensor] = {}
    calls: list[Call] = []

    def note_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_input(args, kwargs)
        kind = (x.shape, x.dtype, x.stride())
        if kind not in shared:
            shared[kind] = torch.zeros_like(x)
        calls.append((layer, shared[kind]))

    hooks = [layer.register_forward_pre_hook(note_call, with_kwargs=True) for layer in _outermost(network)]
    try:
        with torch.no_grad():
            network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _outermost(network: nn.Module) -> list[nn.Module]:
    """The layers of a network; what is inside one is part of it."""
    if layer_kind(network) is not None:
        return [network]
    return [layer for part in network.children() for layer in _outermost(part)]
