"""Rewrite the spatial convolutions of any network by a scheme, and say what changed.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> for change in notes(convert(net, "lr-join")).conversion.changed:
    ...     print(change.name, "was", change.before, "is", change.after)
    0 was 3x3,8 is 3x1,4 + 1x3,4 -> 1x1,8

The caller's network is never touched. The `notes` of the new one hold its `conversion`: what was rewritten, what
stayed, and why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from lowrank_cnn.method.counting import LayerCount, count
from lowrank_cnn.method.init import followed_by_relu, init_
from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d, build_conv
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.method.selection import Kept, NothingToConvertError, Where, select
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import forget, note, notes
from lowrank_cnn.system.text import text_table

Fill = Callable[[str, nn.Conv2d, nn.Module], None]
"""Gives a replacement its weights: called with the name, the dense conv and what replaces it."""


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
class Conversion:
    """What was done to a network; `changed` is enough to do it again."""

    changed: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        """Line by line what changed, in weights; `conversion_costs` has the multiply-accumulates."""
        rows = [(c.name, c.before, c.after, c.params_before, c.params_after) for c in self.changed]
        changed = text_table(("layer", "filters", "now", ">weights", ">now"), rows)
        kept = text_table(("left", "layer", "why"), [(k.name, k.layer, k.reason) for k in self.kept])
        return f"{changed}\n\n{kept}" if self.kept else changed

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates and parameters of a layer, or of a whole network, before and after."""

    name: str
    macs_before: int
    macs_after: int
    params_before: int
    params_after: int


def convert(
    model: nn.Module, scheme: str | Scheme, *, where: Where = None, init: str | Fill = "composite"
) -> nn.Module:
    """A copy of `model` whose spatial convs are replaced by what `scheme` makes of them.

    - `where`: None for every conv both higher and wider than one pixel, except projections of patches; a name, a
      prefix (`layer3`) or a pattern (`*.conv2`); a kernel (3 or (3, 5)); a list of these, such as one of
      `stages(model)`; `f(name, conv) -> bool`.
    - `init`: "composite" for fresh weights of the variance that the paper derives, or a function that gives a
      replacement its weights; `decompose` fits them to the trained ones.

    Depthwise, 1x1, 1xk, transposed, 1-D and 3-D convs stay, and so does a layer that is not a plain `nn.Conv2d`.
    Dtype, device, memory format and training mode are those of the conv replaced; a bias stays a bias. A layer
    that is used in several places stays one layer.
    """
    scheme = parse_scheme(scheme)
    if scheme.name == "embed":
        raise LowRankError("embed changes the number of channels that the next layer expects: use lr-join.")
    with told_if_low_rank(model):
        convs, kept = select(model, scheme, where)
    if init == "composite":
        _check_trainable(convs)
        return rewrite(model, dict.fromkeys(convs, scheme), kept=kept)
    if not callable(init):
        raise LowRankError(f'init is "composite" or a function that fills a replacement, not {init!r}.')
    return rewrite(model, dict.fromkeys(convs, scheme), fill=init, kept=kept)


@contextmanager
def told_if_low_rank(model: nn.Module) -> Iterator[None]:
    """Where nothing can be converted since that was done before, say so, and not why each other conv stays."""
    try:
        yield
    except NothingToConvertError as nothing:
        layers = low_rank_layers(model)
        if not layers:
            raise
        raise NothingToConvertError(
            f"the network is low-rank already ({len(layers)} of its layers), and nothing is left to convert: "
            "for another scheme, start from its dense twin."
        ) from nothing


def low_rank_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Composites of several groups, and chains, by name; what is inside a chain is part of it."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        composite = isinstance(module, CompositeConv2d) and len(module.composite.groups) > 1
        inside = any(not layer or name.startswith(f"{layer}.") for layer in found)
        if (composite or isinstance(module, FactoredConv2d)) and not inside:
            found[name] = module
    return found


def rewrite(
    model: nn.Module, schemes: Mapping[str, Scheme], *, fill: Fill | None = None, kept: Sequence[Kept] = ()
) -> nn.Module:
    """A copy of `model` in which each conv named is replaced by its own scheme; without `fill`, fresh."""
    convs = {name: _conv(model, name) for name in schemes}
    layers = {name: replacement(conv, schemes[name]) for name, conv in convs.items()}
    new = copy_with(model, {convs[name]: layer for name, layer in layers.items()})
    if fill is None:  # fresh weights are no longer those that the card of a trained network speaks of
        forget(new, "training_card")
    fill = fill or _fresh_in(new)
    for name, layer in layers.items():
        fill(name, convs[name], layer)
    changes = tuple(_change(name, convs[name], layers[name], schemes[name]) for name in schemes)
    note(new, conversion=Conversion(changes_of(model) + changes, tuple(kept)))
    return new


def changes_of(model: nn.Module) -> tuple[Change, ...]:
    """The layers of a network that were rewritten; none of one that never was."""
    conversion = notes(model).conversion
    return conversion.changed if conversion else ()


def copy_with(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A deep copy in which other modules stand for some; whatever refers to one, however often, follows."""
    try:
        return copy.deepcopy(model, {id(old): new for old, new in replaced.items()})
    except (RuntimeError, TypeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise LowRankError(f"the model cannot be copied: {first.rstrip('.')}.") from error


def replacement(conv: nn.Conv2d, scheme: Scheme) -> nn.Module:
    """What a scheme makes of one conv, on its device and in its dtype; its weights are yet to be given."""
    layer = build_conv(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        scheme,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        channel_groups=conv.groups,
        padding_mode=conv.padding_mode,
        bias=conv.bias is not None,
    )
    return laid_out_as(conv, layer).train(conv.training)


def laid_out_as(old: nn.Module, new: nn.Module) -> nn.Module:
    """`new` on the device and in the dtype and memory format of `old`."""
    weight = next(old.parameters())
    last = any(_is_channels_last(parameter) for parameter in old.parameters())
    new = new.to(weight.device, weight.dtype)
    return new.to(memory_format=torch.channels_last) if last else new  # type: ignore[call-overload]


def conversion_costs(before: nn.Module, after: nn.Module, input_size: Sequence[int]) -> tuple[Cost, ...]:
    """The cost of each rewritten layer on one image (channels, height, width), and in the last row the total."""
    old, new = (count(model, input_size) for model in (before, after))
    names = [change.name for change in changes_of(after)]
    rows = [_cost(name, _inside(old.layers, name), _inside(new.layers, name)) for name in names]
    return *rows, _cost("total", (old.macs, old.params), (new.macs, new.params))


def _conv(model: nn.Module, name: str) -> nn.Conv2d:
    try:
        conv = model.get_submodule(name)
    except AttributeError:
        raise LowRankError(f"the network has no layer {name}, which was to be rewritten.") from None
    if type(conv) is not nn.Conv2d:
        raise LowRankError(f"{name} is a {type(conv).__name__}, not a plain convolution to rewrite.")
    return conv


def _is_channels_last(tensor: torch.Tensor) -> bool:
    last = torch.channels_last
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def _check_trainable(convs: Mapping[str, nn.Conv2d]) -> None:
    for name, conv in convs.items():
        if not conv.weight.requires_grad:
            raise LowRankError(
                f"{name or 'the conv'} is frozen, and fresh weights would never train: unfreeze it, leave it out "
                "of `where`, or fit it with decompose."
            )


def _fresh_in(network: nn.Module) -> Fill:
    """The paper's initialisation, which asks whether a ReLU follows a layer in this network."""
    follows = followed_by_relu(network)

    def fill(name: str, conv: nn.Conv2d, layer: nn.Module) -> None:
        init_(layer, relu=lambda part, _: follows[".".join(filter(None, (name, part)))])

    return fill


def _change(name: str, conv: nn.Conv2d, layer: nn.Module, scheme: Scheme) -> Change:
    before, after = (" -> ".join(_filters(module)) for module in (conv, layer))
    sizes = [sum(p.numel() for p in module.parameters()) for module in (conv, layer)]
    return Change(name, before, after, str(scheme), *sizes)


def _filters(layer: nn.Module) -> Iterator[str]:
    """The filters of a conv, a composite, or each stage of a chain."""
    if isinstance(layer, CompositeConv2d):
        yield str(layer.composite)
    elif isinstance(layer, nn.Conv2d):
        yield f"{layer.kernel_size[0]}x{layer.kernel_size[1]},{layer.out_channels}"
    else:
        for stage in layer.children():
            yield from _filters(stage)


def rows_of(layers: Sequence[LayerCount], name: str) -> list[LayerCount]:
    """The rows of a layer and of its parts; all rows for the network itself, which has no name."""
    return [row for row in layers if not name or row.name == name or row.name.startswith(f"{name}.")]


def _inside(layers: Sequence[LayerCount], name: str) -> tuple[int, int]:
    rows = rows_of(layers, name)
    return sum(row.macs for row in rows), sum(row.params for row in rows)


def _cost(name: str, before: tuple[int, int], after: tuple[int, int]) -> Cost:
    return Cost(name, before[0], after[0], before[1], after[1])
