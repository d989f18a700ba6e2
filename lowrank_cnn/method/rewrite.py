"""Replace convolutions in a copy of a network by schemes, and report the changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, explained, first_line
from lowrank_cnn.core.modules import InputSize, arguments, watched
from lowrank_cnn.core.notes import AsDict, forget, note, notes
from lowrank_cnn.core.text import html_table, text_table
from lowrank_cnn.method.branches import BranchedConv2d, fold_branches
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer
from lowrank_cnn.method.init import followed_by_relu, init_
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import Scheme


@dataclass(frozen=True)
class Kept:
    """A conv that was left as it was, and why."""

    name: str
    layer: str
    reason: str


@dataclass(frozen=True)
class Change:
    """A conv that was rewritten: its filters before and after, by which scheme, and its parameters."""

    name: str
    before: str
    after: str
    scheme: str
    params_before: int
    params_after: int


@dataclass(frozen=True)
class Conversion(AsDict):
    """The layers of a network that were rewritten, and those that stayed; `changed` is enough to repeat it."""

    changed: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        """Line by line what changed, in weights; `conversion_costs` has the multiply-accumulates."""
        return "\n\n".join(text_table(columns, rows) for _, columns, rows in self._tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The tables that notebooks show."""
        return "".join(html_table(columns, rows, title) for title, columns, rows in self._tables())

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], Sequence[Sequence[object]]]]:
        changed = [(c.name, c.before, c.after, c.params_before, c.params_after) for c in self.changed]
        kept = [(k.name, k.layer, k.reason) for k in self.kept]
        yield "Rewritten", ("layer", "filters", "now", ">weights", ">now"), changed
        if kept:
            yield "Left as they were", ("left", "layer", "why"), kept


def check_calls(model: nn.Module, new: nn.Module, names: Sequence[str], input_size: InputSize) -> None:
    """Run the new network once on one image: it must call the new layers and none of those they replace.

    If it fails and the original does not, the new layers are at fault. If both fail, nothing is known.
    """
    called: set[str] = set()
    old = {name: model.get_submodule(name) for name in names}
    with watched(old, lambda name, _: called.add(name)):
        reason = failure(new, input_size)
    if called:
        raise LowRankError(
            f"the network still calls the original of {min(called)}, which something outside its modules holds "
            "(a global, say): leave that layer out of `where`."
        )
    if reason and not failure(model, input_size):
        raise LowRankError(f"with its new layers the network fails: {reason}. Leave some out by `where`.")


@torch.no_grad()
def failure(model: nn.Module, input_size: InputSize) -> str:
    """Why a network does not run on one image, empty if it does."""
    like = next(model.parameters())
    try:
        with unchanged(model, evaluating=True):
            args, kwargs = arguments(input_size, dtype=like.dtype, device=like.device)
            model(*args, **kwargs)
    except Exception as error:  # a forward may fail in any way of its own
        return first_line(error)
    return ""


Fill = Callable[[str, nn.Conv2d, nn.Module], None]
"""Gives a replacement its weights: called with the name, the dense conv and what replaces it."""


def low_rank_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Composites of several groups, and chains, by name; layers inside a chain are not listed."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        composite = isinstance(module, CompositeConv2d | BranchedConv2d) and len(module.composite.groups) > 1
        inside = any(not layer or name.startswith(f"{layer}.") for layer in found)
        if (composite or isinstance(module, FactoredConv2d | FactoredLayer)) and not inside:
            found[name] = module
    return found


def rewrite(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    *,
    fill: Fill | None = None,
    kept: Sequence[Kept] = (),
) -> nn.Module:
    """A copy of `model` in which each layer named is replaced by its own scheme; without `fill`, fresh.

    `kept` are the layers that stay, if they have no scheme.
    """
    if fill is not None and any(scheme.branches for scheme in schemes.values()):
        raise LowRankError("branches train from fresh weights: take the scheme without branches to fit weights.")
    convs: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    if missing := [name for name in schemes if name not in convs]:
        raise LowRankError(f"the network has no layer {missing[0]}, which was to be rewritten.")
    layers: dict[str, nn.Module] = {}
    for name, scheme in schemes.items():
        try:
            layers[name] = replacement(convs[name], scheme)
        except LowRankError as error:
            raise LowRankError(f"{name} cannot be rewritten: {error}") from error
    new = copy_with(model, {convs[name]: layer for name, layer in layers.items()})
    if fill is None:  # the card of a trained network does not describe fresh weights
        forget(new, "training_card")
    follows = {} if fill else followed_by_relu(new)
    for name, layer in layers.items():
        if fill is not None:
            fill(name, convs[name], layer)
        elif not isinstance(layer, FactoredLayer) or isinstance(convs[name], nn.Linear):
            init_(layer, relu=lambda part, _, name=name: follows[".".join(filter(None, (name, part)))])
        # Other layers of the scheme channel keep torch's own initialisation.
    changes = tuple(change_of(name, convs[name], layers[name], schemes[name]) for name in schemes)
    rest = tuple(row for row in kept if row.name not in schemes)
    note(new, conversion=Conversion(changes_of(model) + changes, rest))
    return new


def changes_of(model: nn.Module) -> tuple[Change, ...]:
    """The rewritten layers of a network; empty if there are none."""
    conversion = notes(model).conversion
    return conversion.changed if conversion else ()


def copy_with(model: nn.Module, replaced: Mapping[Any, Any] = MappingProxyType({})) -> nn.Module:
    """A deep copy with some modules or tensors replaced, wherever and however often they are referred to.

    A weight that a hook computes from others (pruning, the older weight norm) is copied without its gradients:
    torch copies no other tensor that was computed, and the hook computes it anew in every call.
    """
    _check_functions(model)
    memo: dict[int, object] = {id(old): new for old, new in replaced.items()}
    computed = (v for part in model.modules() for v in vars(part).values() if isinstance(v, Tensor))
    memo |= {id(tensor): tensor.detach().clone() for tensor in computed if not tensor.is_leaf}
    with explained("the model cannot be copied"):
        return copy.deepcopy(model, memo)


def _check_functions(model: nn.Module) -> None:
    """Refuse functions in attributes (`self.run = lambda x: conv(x)`) that hold modules: a copy shares them."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, FunctionType) and any(isinstance(held, nn.Module) for held in _held(value)):
                label = f"{name}.{key}".lstrip(".")
                raise LowRankError(
                    f"{label} is a function that holds modules, and a copy of the network would go on calling the "
                    "original's: make it a method."
                )


def _held(function: FunctionType) -> Iterator[object]:
    """The values that a function has from its closure and its defaults."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that was never assigned
            yield cell.cell_contents


def replacement(layer: nn.Module, scheme: Scheme) -> nn.Module:
    """Build what replaces a layer, on its device and in its dtype; its weights are set later."""
    return laid_out_as(layer, scheme.build(layer)).train(layer.training)


def laid_out_as(old: nn.Module, new: nn.Module) -> nn.Module:
    """`new` on the device and in the dtype and memory format of `old`."""
    weight = next(old.parameters())
    last = any(is_channels_last(parameter) for parameter in old.parameters())
    new = new.to(weight.device, weight.dtype)
    return in_channels_last(new) if last else new


def in_channels_last(network: nn.Module) -> nn.Module:
    """Lay out filters in channels_last, in place; `Module.to` refuses a network that has 3-D convs too."""
    last = torch.channels_last
    return network._apply(lambda tensor: tensor.contiguous(memory_format=last) if tensor.dim() == 4 else tensor)


def frozen_like(old: nn.Module, new: nn.Module) -> nn.Module:
    """`new` with weights and a bias that require gradients where those of `old` do."""
    for name, parameter in new.named_parameters():
        source = old.bias if name.endswith("bias") else old.weight
        parameter.requires_grad_(source.requires_grad)  # type: ignore[union-attr, operator]
    return new


def is_channels_last(tensor: Tensor) -> bool:
    """Whether images or filters are in channels_last, and not in an order that fits both formats."""
    last = torch.channels_last
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def change_of(name: str, conv: nn.Module, layer: nn.Module, scheme: Scheme | str) -> Change:
    """Describe how a layer was rewritten."""
    before, after = (" -> ".join(_filters(module)) for module in (conv, layer))
    sizes = [sum(p.numel() for p in fold_branches(module).parameters()) for module in (conv, layer)]
    return Change(name, before, after, str(scheme), *sizes)


def _filters(layer: nn.Module) -> Iterator[str]:
    """The filters of a conv, a composite, or each stage of a chain."""
    if isinstance(layer, CompositeConv2d):
        yield str(layer.composite)
    elif isinstance(layer, BranchedConv2d):
        yield f"{layer.composite} with branches"
    elif isinstance(layer, nn.Linear):
        yield f"linear,{layer.out_features}"
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        yield f"norm,{layer.num_features}"
    elif isinstance(layer, _ConvNd):
        yield f"{'x'.join(map(str, layer.kernel_size))},{layer.out_channels}"
    elif hasattr(layer, "copy_dense"):  # it learns the shapes of its filters
        yield f"learned,{len(layer.weight)}"  # type: ignore[arg-type]
    else:
        for stage in layer.children():
            yield from _filters(stage)
