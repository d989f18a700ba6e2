"""Make a trained network thinner and keep its weights: the channels of the smallest weights are removed.

`thin` decides how many channels each layer keeps. Torch-Pruning finds the layers that have to keep the same
channels (Fang et al., 2023, "DepGraph"), ranks the channels and removes them. The result is compared with the
network itself, in which the weights of the removed channels are zeros.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lowrank_cnn.core.compare import agree, is_finite, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, explained, require
from lowrank_cnn.core.modules import InputSize, arguments
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.method.chains import outputs_of
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.rewrite import copy_with, is_channels_last
from lowrank_cnn.method.schemes import Bands, is_depthwise, parse_scheme
from lowrank_cnn.method.select import check_values, parameter_uses
from lowrank_cnn.method.thin import CONVS, narrowed, noted, thin, thin_near

_CANNOT = "the network cannot be pruned"
_OVER_CHANNELS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Norms that divide by what all channels have: by something else with fewer of them."""


@progress("prune")
def prune(
    model: nn.Module,
    *,
    width: float | None = None,
    macs: float | None = None,
    input_size: InputSize,
    multiple: int = 8,
    layers: Mapping[str, float] | None = None,
) -> nn.Module:
    """A thinner copy of a trained network that keeps the channels of the largest weights, to be fine-tuned.

    Options and shapes are those of `thin`, which gives fresh weights. Layers whose outputs are added keep the same
    channels, and norms keep the statistics of these. Needs `pip install ".[prune]"`.

    - `width`: the share of its output channels that each layer keeps.
    - `macs`: the share of multiply-accumulates to keep instead; the nearest width is found by bisection.
    - `input_size`: channels, height and width of one image, or an example: a tensor, a tuple of all inputs, or a
      dictionary of them by keyword.
    - `multiple`: channels are rounded to multiples of this. A layer with fewer channels keeps them.
    - `layers`: the widths of some layers, by name or by the name of a module around them, in place of `width`.

    >>> import lowrank_cnn as lr
    >>> dense = lr.create_model("nin", pretrained="cifar10")
    >>> small = lr.prune(dense, macs=0.6, input_size=(3, 32, 32))
    >>> round(lr.count(small, (3, 32, 32)).macs / lr.count(dense, (3, 32, 32)).macs, 1)
    0.6
    """
    tool = require("torch_pruning", extra="prune", purpose="prune")
    grouped = [conv.groups for conv in model.modules() if isinstance(conv, CONVS) and not is_depthwise(conv)]
    sizes = narrowed("prune", model, width, macs, input_size, math.lcm(multiple, *grouped), layers or {}, most=1)
    check_values(model)
    if not is_finite([*model.parameters(), *model.buffers()]):
        raise LowRankError(f"{_CANNOT}: it has weights that are not finite.")
    uses = parameter_uses(model)
    for name, module in model.named_modules():
        if any(uses[id(parameter)] > 1 for parameter in module._parameters.values()):
            raise LowRankError(f"{_CANNOT}: {name} shares a parameter with another layer.")
    new = copy_with(model).eval().requires_grad_(True)  # autograd's graph shows the layers
    untraced = explained("Torch-Pruning cannot follow the channels of the network")
    with untraced, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # about parameters of modules that it does not know
        zeroed = copy_with(new)
        _remove_channels(new, zeroed, sizes, input_size, tool)
        pruned = new.state_dict()
        if wrong := [name for name, tensor in sizes.state_dict().items() if pruned[name].shape != tensor.shape]:
            raise LowRankError(f"{_CANNOT}: its layers would not fit each other any longer, as {wrong[0]}.")
        # The pruned network has to compute what the zeroed one does, but for norms over channels.
        skipping = register_module_forward_hook(lambda m, x, _: x[0] if isinstance(m, _OVER_CHANNELS) else None)
        with torch.no_grad(), skipping:
            same = agree(_run(new, input_size), _run(zeroed, input_size))
        if not same:
            raise LowRankError(f"{_CANNOT}: with fewer channels it computes something else, as after a shuffle.")
    return noted("prune", _as_it_was(new, model), model, width, macs, input_size, multiple)


def cheaper(
    network: nn.Module,
    *,
    scheme: str | None = None,
    macs: float | None = None,
    input_size: InputSize,
    pretrained: bool,
) -> nn.Module:
    """A low-rank network by a scheme, or else a thinner one, within a share of the MACs; to be trained.

    Weights that are `pretrained` are decomposed or pruned. Otherwise the new layers have fresh weights; they also
    have with a scheme that fits no trained filters, such as lr.
    """
    if scheme is None:
        assert macs is not None
        return thin_near(network, macs, input_size, prune if pretrained else thin)
    parsed = parse_scheme(scheme)
    fits = parsed.mixes or (isinstance(parsed, Bands) and macs is None)
    make = decompose if pretrained and fits else convert
    return make(network, scheme, macs=macs, input_size=input_size)


def _run(network: nn.Module, input_size: InputSize) -> Any:
    """The results on an example, or on an image that is the same each time."""
    like = next(network.parameters())
    with unchanged(network):
        args, kwargs = arguments(input_size, device=like.device, dtype=like.dtype)
        return network(*args, **kwargs)


def _remove_channels(
    new: nn.Module, zeroed: nn.Module, sizes: nn.Module, input_size: InputSize, tool: Any
) -> None:
    """Give each layer as many channels as in `sizes`: those of the largest norm over all layers that use them.

    In `zeroed`, a copy, the weights that go are set to zero.
    """
    graph, marks = tool.DependencyGraph(), copy_with(zeroed)
    options = {"forward_fn": lambda network, _: _run(network, input_size), "output_transform": tensors_of}
    graph.build_dependency(new, (), **options)
    importance = tool.importance.GroupMagnitudeImportance(p=2)
    for name, layer in new.named_modules():
        if not isinstance(layer, (*CONVS, nn.Linear)) or is_depthwise(layer):  # which follows the layer before
            continue
        channels, kept = outputs_of(layer), outputs_of(sizes.get_submodule(name))
        if kept == channels:  # or a layer that keeps the same channels came before
            continue
        step(name)
        remove = graph.get_pruner_of_module(layer).prune_out_channels
        group = graph.get_pruning_group(layer, remove, list(range(channels)))
        grouped = [item.dep for item in group if getattr(item.dep.target.module, "groups", 1) > 1]
        grouped = [dep for dep in grouped if not is_depthwise(dep.target.module)]
        parts = max((dep.target.module.groups for dep in grouped), default=1)
        for conv, out in ((dep.target.module, graph.is_out_channel_pruning_fn(dep.handler)) for dep in grouped):
            if conv.groups != parts or channels != (conv.out_channels if out else conv.in_channels):
                raise LowRankError(
                    f"{_CANNOT}: the groups of a conv that takes {name} would lose different channels."
                )
        # A grouped conv loses the same places of every group.
        order = importance(group).view(parts, -1).mean(0).argsort()
        places = order[: (channels - kept) // parts]
        chosen = [int(place) + part * len(order) for part in range(parts) for place in places]
        graph.get_pruning_group(layer, remove, chosen).prune()
    # The same channels leave a copy whose weights are their own places: those left were kept.
    again = tool.DependencyGraph()
    again.build_dependency(marks, (), **options)
    for weight in marks.parameters():
        weight.data = torch.arange(weight.numel(), dtype=torch.float64, device=weight.device).view(weight.shape)
    again.load_pruning_history(graph.pruning_history())
    for name, weight in zeroed.named_parameters():
        kept = marks.get_parameter(name).data.flatten().long()
        weight.data *= torch.zeros_like(weight).flatten().index_fill_(0, kept, 1).view(weight.shape)
    for norm, narrow in zip(new.modules(), sizes.modules(), strict=True):
        if isinstance(norm, nn.GroupNorm) and isinstance(narrow, nn.GroupNorm):
            norm.num_groups = narrow.num_groups


@torch.no_grad()
def _as_it_was(new: nn.Module, model: nn.Module) -> nn.Module:
    """In the modes and memory formats of the model, with its parameters frozen."""
    for name, parameter in model.named_parameters():
        own = new.get_parameter(name).requires_grad_(parameter.requires_grad)
        if is_channels_last(parameter):
            own.data = own.data.contiguous(memory_format=torch.channels_last)
    for name, module in model.named_modules():
        new.get_submodule(name).training = module.training
    return new
