"""Make a network learn the shapes of its filters, and find what each shape costs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from lowrank_cnn.kernels.network_graph import first_input
from lowrank_cnn.method.channel_order import Route, free_routes
from lowrank_cnn.method.conv_form import form_of
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.rewriting import copy_with, frozen_like, rewrite
from lowrank_cnn.method.scheme import Scheme
from lowrank_cnn.method.scheme_rules import NONE
from lowrank_cnn.method.selection import Where, select
from lowrank_cnn.method.shape_choice import ShapeCosts
from lowrank_cnn.method.shaping import (
    GatedLinear,
    ShapedConv2d,
    may_remove,
)
from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note


def shape_network(
    model: nn.Module, scheme: Scheme, input_size: Sequence[int], *, where: Where = None
) -> nn.Module:
    """A copy of a dense network, computing the same, whose spatial convs can learn the shapes of their filters.

    If the scheme may remove filters, convs of 1x1 take part too, and so do linear layers that read channels.
    Frozen convs keep their filters, and so do those that run in training alone: they cost nothing later.
    """
    convs, kept = select(model, scheme, where, trained_on=True)
    running = _running(model, list(convs), input_size)
    schemes = {name: scheme for name, conv in convs.items() if conv.groups == 1 and name in running}
    if not schemes:
        raise LowRankError("shapes are learned by convolutions without channel groups, and this network has none.")
    if may_remove(scheme):
        schemes |= _narrowed(model, schemes, scheme, free_routes(model, input_size), widen=where is None)

    def fill(_: str, layer: nn.Module, new: nn.Module) -> None:
        new.copy_dense(layer.weight, layer.bias)  # type: ignore[operator]
        frozen_like(layer, new)

    new = rewrite(model, schemes, fill=fill, kept=kept)
    note(new, input_size=tuple(input_size))
    return new


@torch.no_grad()
def _running(model: nn.Module, names: Sequence[str], input_size: Sequence[int]) -> set[str]:
    """The layers that run in evaluation; an auxiliary head does not."""
    like = next(model.parameters())
    image = torch.zeros(1, *input_size, device=like.device, dtype=like.dtype)
    return {*layer_inputs(copy_with(model).eval(), names, image)}


def _narrowed(
    model: nn.Module, chosen: Mapping[str, Scheme], scheme: Scheme, routes: Mapping[str, Route], *, widen: bool
) -> dict[str, Scheme]:
    """The layers besides those chosen that gates are for: readers, and convs of 1x1 whose channels are free."""
    one = (("1x1", Fraction(1)),)
    own = replace(scheme, shapes=(*one, (NONE, Fraction(1))))
    more = {name: own for name in routes if widen and name not in chosen and _is_pointwise(model, name)}
    sources = {*chosen, *more}
    readers = [reader.name for name, route in routes.items() if name in sources for reader in route.readers]
    gates = [name for name in readers if name not in sources]
    return more | {name: replace(scheme, shapes=_kernel_of(model, name)) for name in gates}


def _is_pointwise(model: nn.Module, name: str) -> bool:
    conv = model.get_submodule(name)
    if not isinstance(conv, nn.Conv2d) or not conv.weight.requires_grad:
        return False
    form = form_of(conv)
    return form is not None and form.kernel == (1, 1) and form.groups == 1


def _kernel_of(model: nn.Module, name: str) -> tuple[tuple[str, Fraction], ...]:
    """A reader that learns no shapes keeps its kernel."""
    height, width = getattr(model.get_submodule(name), "kernel_size", (1, 1))
    return ((f"{height}x{width}", Fraction(1)),)


def mac_costs(network: nn.Module, dense: nn.Module, input_size: Sequence[int]) -> ShapeCosts:
    """Multiply-accumulates of one image."""
    found = count(dense, input_size)
    macs = {row.name: row.macs for row in found.layers}
    filters, linear = {}, {}
    for name, layer in network.named_modules():
        if isinstance(layer, ShapedConv2d):
            taps = layer.form.kernel[0] * layer.form.kernel[1]
            tap = macs.get(name, 0) / taps / layer.out_channels
            filters[name] = tuple(tap * height * width for height, width in layer.shapes)
        elif isinstance(layer, GatedLinear):
            linear[name] = float(macs.get(name, 0))
    rest = found.macs - sum(macs.get(name, 0) for name in (*filters, *linear))
    return ShapeCosts("macs", filters, linear, float(rest), float(found.macs))


def layer_inputs(network: nn.Module, names: Sequence[str], image: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each layer reads when the network runs on an image."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, args, kwargs: seen.update({name: first_input(args, kwargs)})

    layers = {name: network.get_submodule(name) for name in names}
    hooks = [layer.register_forward_pre_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with unchanged(network):
            network(*copied(image))
    finally:
        for hook in hooks:
            hook.remove()
    return seen
