"""How much a network would lose if a filter had a smaller shape, or were removed.

Each tap counts by the squared change of the loss that its removal predicts to first order, measured on a few
batches (Molchanov et al. 2019). The squared weights stand in before training, and where no gradient arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.channels import Route
from lowrank_cnn.method.shaped_layers import GatedLinear, ShapedConv2d, shaped_convs

_TINY = 1e-30
_COMMON = 0.05
"""The part of an average filter that counts with every filter: one that shows nothing follows the others."""


@dataclass(frozen=True)
class Damage:
    """The loss and the rest of one layer, filter by filter.

    - `shapes`: the immediate loss with each shape, [filters, shapes].
    - `removal`: the loss if the filter is removed, [filters].
    - `views`: the part that a filter keeps with each shape once the network has adapted, [filters, shapes, views].
      A view is a row or a column of the kernel, and half of each tap belongs to either. A filter keeps the rows
      and columns that its shape reaches: an upright filter keeps all rows and, followed by a lying one in the next
      layer, the corners too. The last view is the part that does not depend on the shape.
    """

    shapes: Tensor
    removal: Tensor
    views: Tensor

    @property
    def whole(self) -> float:
        """The total that the layer can lose."""
        return max(float(self.removal.sum()), _TINY)


@torch.no_grad()
def damage_by_weights(network: nn.Module, routes: Mapping[str, Route]) -> dict[str, Damage]:
    """Damage estimated from the weights alone, normalised to one per layer.

    A filter loses the share of its squared weights outside the shape, times how much passes through the filter.
    """
    found = {}
    for name, layer in shaped_convs(network).items():
        taps = (layer.weight.double().square() * layer.inputs[:, None, None]).sum(1)
        passing = _passing(network, routes.get(name), taps.sum((1, 2)))
        scale = passing / taps.sum((1, 2)).clamp_min(_TINY)
        found[name] = _damage(layer, (taps * scale[:, None, None]).cpu(), passing.cpu())
    return found


def damage_by_loss(
    network: nn.Module,
    routes: Mapping[str, Route],
    batches: Iterable[tuple[Tensor, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[str, Damage]:
    """Damage estimated from gradients on batches of (images, targets). The network is not changed.

    A layer that no gradient reaches is judged by its weights: it leads to an output without a loss, or all outputs
    of the network are dead.
    """
    layers = shaped_convs(network)
    readers = {n: m for n, m in network.named_modules() if isinstance(m, ShapedConv2d | GatedLinear)}
    taps = {name: torch.zeros(len(m.weight), *m.kernel_size).double() for name, m in layers.items()}
    channels = {name: torch.zeros(len(module.inputs)).double() for name, module in readers.items()}
    with _undisturbed(network), _regrowing(readers.values()):
        for images, targets in batches:
            value = loss(network(images), targets)
            weights = [module.weight for module in readers.values()]
            slopes = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
            for (name, module), slope in zip(readers.items(), slopes, strict=True):
                change = slope.detach().double() * module.weight.detach().double()
                if isinstance(module, ShapedConv2d):
                    taps[name] += (change * module.inputs[:, None, None]).sum(1).square().cpu()
                    change = (change * module.masks[module.choice][:, None]).sum((2, 3))
                channels[name] += change.sum(0).square().cpu()
    found = {}
    for name, layer in layers.items():
        whole = taps[name].sum((1, 2))
        passing = whole if name not in routes else _read(routes[name], channels, whole)
        found[name] = _damage(layer, taps[name], torch.maximum(whole, passing))
    silent = [name for name, damage in found.items() if not _TINY < float(damage.removal.sum()) < torch.inf]
    by_weights = damage_by_weights(network, routes) if silent else {}
    return {**found, **{name: by_weights[name] for name in silent}}


def _damage(layer: ShapedConv2d, taps: Tensor, removal: Tensor) -> Damage:
    """The damage, from the loss without each tap ([filters, height, width]) and without each filter."""
    masks = layer.masks[: len(layer.shapes)].to(taps)
    lost = taps.sum((1, 2))[:, None] - torch.einsum("ohw,shw->os", taps, masks)
    always = (removal - taps.sum((1, 2))).clamp_min(0)[:, None, None].expand(-1, len(masks), 1)
    taps = taps + _COMMON * taps.mean(0)
    rows, columns = (taps.sum(axis)[:, None] * masks.amax(axis) / 2 for axis in (2, 1))
    return Damage(lost.clamp_min(0), removal, torch.cat([rows, columns, always], 2))


def _passing(network: nn.Module, route: Route | None, energy: Tensor) -> Tensor:
    """How much passes through each filter: the squared scale of its norm times the weights that read it."""
    if route is None:
        return torch.full_like(energy, 1 / len(energy))
    scales = [getattr(network.get_submodule(norm), "weight", None) for norm in route.norms]
    passing = energy if not scales or scales[0] is None else scales[0].double().square()
    read = torch.zeros_like(energy)
    for reader in route.readers:
        weight: Any = network.get_submodule(reader.name).weight
        read += weight.double().square().unflatten(1, (len(energy), -1)).flatten(2).sum((0, 2))
    passing = (passing * read).clamp_min(_TINY)
    return passing / passing.sum()


def _read(route: Route, channels: Mapping[str, Tensor], whole: Tensor) -> Tensor:
    """The loss without each channel, summed over the layers that read it and measure this."""
    gated = [reader for reader in route.readers if reader.name in channels]
    return sum((channels[r.name].unflatten(0, (len(whole), -1)).sum(1) for r in gated), torch.zeros_like(whole))


@contextlib.contextmanager
def _regrowing(layers: Iterable[ShapedConv2d | GatedLinear]) -> Iterator[None]:
    """Let gradients reach masked taps, to see what these would contribute, and weights that are frozen."""
    before = [(layer, layer.regrow, layer.weight.requires_grad) for layer in layers]
    for layer, *_ in before:
        layer.regrow = True
        layer.weight.requires_grad_(True)
    try:
        yield
    finally:
        for layer, regrow, trains in before:
            layer.regrow = regrow
            layer.weight.requires_grad_(trains)


@contextlib.contextmanager
def _undisturbed(network: nn.Module) -> Iterator[None]:
    """Normalise by batch statistics within the block, so that a filter's scale does not count, and restore all."""
    modes = {module: module.training for module in network.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    network.eval()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and modes[module]:
            module.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
