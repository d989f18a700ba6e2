"""Gates: while it trains, each filter draws a shape at every step, and learns which draws serve the loss.

A filter has one logit for each shape. In training it draws by Gumbel-softmax (Jang et al. 2017): forward it has
one shape, and backward the gradient is that of the soft mixture. Every shape pays for its cost: `charge_gates`
finds the one price at which the draws cost as much as is allowed, and takes it off the logits. In evaluation a
filter has its likeliest shape.

Logits are buffers, and are moved between epochs on a few batches, so that nothing of a training step changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.shape_choice import ShapeCosts
from lowrank_cnn.method.shape_damage import Damage, shaped_convs, undisturbed
from lowrank_cnn.method.shaped_layers import ShapedConv2d

START = 3.0
"""The logit that the dense kernel begins with: a filter draws it nine times of ten among four shapes."""
RATE = 0.3
"""How far a batch moves logits, as the root mean square over a layer."""
_DEAREST, _STEPS = 1e9, 60


def add_gates(network: nn.Module) -> None:
    """Let every conv that learns shapes draw them."""
    for layer in shaped_convs(network).values():
        layer.add_gates(START)


def learn_gates(
    network: nn.Module, batches: Iterable[tuple[Tensor, Any]], loss: Callable[[Any, Any], Tensor]
) -> None:
    """Move the logits against the gradient of the loss, a step of one length for each batch.

    The length does not depend on the gradient's: its scale differs by orders of magnitude between layers.
    """
    gates = [_gates(layer) for layer in shaped_convs(network).values()]
    with undisturbed(network, keep=gates):
        for images, targets in batches:
            for gate in gates:
                gate.requires_grad_()
            value = loss(network(images), targets)
            slopes = torch.autograd.grad(value, gates, allow_unused=True, materialize_grads=True)
            for gate, slope in zip(gates, slopes, strict=True):
                gate.requires_grad_(False)
                size = slope.square().mean().sqrt()
                gate -= RATE * slope / size.clamp_min(torch.finfo(size.dtype).tiny)


def charge_gates(network: nn.Module, costs: ShapeCosts, share: float) -> None:
    """Set the price of cost, by bisection, at which draws cost this share of the dense network on average."""
    layers = shaped_convs(network)
    each = {name: _per_filter(costs, name, _gates(layer)) for name, layer in layers.items()}
    fixed = costs.rest + sum(costs.linear.values())

    def spent(price: float) -> float:
        draws = ((_gates(layer) - price * each[name]).softmax(1) for name, layer in layers.items())
        return fixed / costs.dense + sum(float((p * c).sum()) for p, c in zip(draws, each.values(), strict=True))

    low, high = 0.0, _DEAREST
    for _ in range(_STEPS if spent(0.0) > share else 0):
        middle = (low + high) / 2 if low else high / 10
        low, high = (middle, high) if spent(middle) > share else (low, middle)
    for name, layer in layers.items():
        layer.charge.copy_((high if low else 0.0) * each[name])


def _gates(layer: ShapedConv2d) -> Tensor:
    assert layer.gates is not None, "the layer has no gates"
    return layer.gates


def _per_filter(costs: ShapeCosts, name: str, like: Tensor) -> Tensor:
    """The cost of one filter of each shape, as a share of the dense network."""
    return torch.tensor(list(costs.filters[name]), device=like.device) / costs.dense


def damage_by_gates(network: nn.Module) -> dict[str, Damage]:
    """The damage of a shape: how seldom a filter would draw it if all shapes cost nothing."""
    found = {}
    for name, layer in shaped_convs(network).items():
        drawn = _gates(layer).double().softmax(1).cpu()
        found[name] = Damage(1 - drawn, torch.ones(len(drawn), dtype=torch.float64), drawn[:, :, None])
    return found


def close_gates(network: nn.Module) -> None:
    """From here on filters have the shapes that were chosen."""
    for layer in shaped_convs(network).values():
        layer.drawing.fill_(False)
