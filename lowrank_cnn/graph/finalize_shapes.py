"""Turn a network that has learned the shapes of its filters into one of plain convs and composites.

Filters are sorted by shape, and norms and reading layers follow. If the order of channels is fixed, filters were
chosen in sorted runs already. No masks are left; the result is compared with the masked network in float64, as a
whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import difference
from lowrank_cnn.core.errors import LowRankError, to_caller
from lowrank_cnn.core.files import LARGEST_JSON, parse_json, read_regular, write_json
from lowrank_cnn.core.modules import InputSize, checked_size, known_inputs
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.text import text_table
from lowrank_cnn.graph.channels import Route, free_routes
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.method.rewrite import (
    Conversion,
    change_of,
    changes_of,
    copy_with,
    frozen_like,
    laid_out_as,
    rewrite,
)
from lowrank_cnn.method.schemes import Exact, Scheme, parse_scheme
from lowrank_cnn.method.shaped_layers import ShapedConv2d, shaped_convs
from lowrank_cnn.method.spec import Kernel, Pair

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class LearnedShapes:
    """The filters that each layer of a network ended with, by name, as `exact` schemes.

    >>> shapes = lr.load_shapes("shapes.json")  # doctest: +SKIP
    """

    layers: Mapping[str, Scheme]

    def __str__(self) -> str:
        rows = [(name, ", ".join(f"{n} {s}" for s, n in scheme.shapes)) for name, scheme in self.layers.items()]
        return text_table(("layer", "filters"), rows)

    @classmethod
    def of(cls, model: nn.Module) -> LearnedShapes:
        """The learned shapes of a network with final shapes; empty for any other network."""
        found = {change.name: parse_scheme(change.scheme) for change in changes_of(model)}
        return cls({name: scheme for name, scheme in found.items() if isinstance(scheme, Exact)})

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        return {"learned_shapes": {name: str(scheme) for name, scheme in self.layers.items()}}

    def save(self, path: str | Path) -> Path:
        """Write the shapes as JSON; `load_shapes` reads them."""
        write_json(Path(path), self.to_dict())
        return Path(path)

    def apply(self, model: nn.Module) -> nn.Module:
        """A copy of the dense network with these shapes and fresh weights, to be trained from scratch."""
        return rewrite(model, self.layers)


def load_shapes(path: str | Path) -> LearnedShapes:
    """Read the shapes that `LearnedShapes.save` wrote.

    >>> shapes = lr.load_shapes("shapes.json")  # doctest: +SKIP
    """
    try:
        rows = parse_json(read_regular(path, most=LARGEST_JSON))["learned_shapes"]
        layers = {str(name): parse_scheme(str(scheme)) for name, scheme in rows.items()}
    except OSError as error:
        raise LowRankError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LowRankError(
            f"{path} has no learned shapes: {to_caller('learn_shapes', 'train --scheme learned')} writes them."
        ) from error
    if not all(isinstance(scheme, Exact) for scheme in layers.values()):
        raise LowRankError(f"{path} holds schemes other than exact, which learned shapes are written in.")
    return LearnedShapes(layers)


def has_learned(model: nn.Module) -> bool:
    """Whether a network still has the masks of learning shapes."""
    return bool(shaped_convs(model))


@torch.no_grad()
def finalize_shapes(network: nn.Module, input_size: InputSize | None = None) -> nn.Module:
    """A copy of plain convs and composites that computes the same; the network itself if it has no masks."""
    if not has_learned(network):
        return network
    size = checked_size(known_inputs(network, input_size, "a network that learned its shapes"))
    convs, layers = shaped_convs(network), _plain_layers(network, free_routes(network, size))
    new = copy_with(network, {network.get_submodule(name): layer for name, layer in layers.items()})
    dense = {change.name: change for change in changes_of(network)}
    changes = [row for row in changes_of(network) if not row.scheme.startswith("learned")]
    for name, conv in convs.items():
        scheme = exact_scheme(_groups(conv))
        if scheme == exact_scheme([(conv.form.kernel, conv.out_channels)]):  # the filters of the dense layer
            continue
        change = change_of(name, conv, layers[name], scheme)
        before = dense.get(name, change)  # the layer that learned had a larger kernel than the dense one
        changes.append(replace(change, before=before.before, params_before=before.params_before))
    kept = notes(network).conversion
    note(new, conversion=Conversion(tuple(changes), kept.kept if kept else ()))
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(2, *size, generator=draw, dtype=torch.float64)
    error = difference(*(copy_with(net).cpu().double().eval()(images) for net in (new, network)))
    if not error <= _TOLERANCE:
        raise LowRankError(f"the network without its masks would differ by {error:.1e}: it is not used.")
    return new


def _plain_layers(network: nn.Module, routes: Mapping[str, Route]) -> dict[str, nn.Module]:
    """The layers that change, by name."""
    convs = shaped_convs(network)
    if any(bool((layer.choice.diff() < 0).any()) for name, layer in convs.items() if name not in routes):
        raise LowRankError("a layer whose channels are added to others has filters that are not sorted by shape.")
    orders = {name: torch.argsort(layer.choice.cpu(), stable=True) for name, layer in convs.items()}
    arriving = {  # the features of each reader, in their new order
        reader: (orders[name][:, None] * block + torch.arange(block)).flatten()
        for name, route in routes.items()
        if name in orders
        for reader, block in route.readers.items()
    }
    found: dict[str, nn.Module] = {}
    for name, layer in convs.items():
        found[name] = _plain_conv(layer, orders[name], arriving.get(name))
        for norm in routes[name].norms if name in routes else ():
            found[norm] = _reordered(network.get_submodule(norm), orders[name], dim=0)
    others = {name: features for name, features in arriving.items() if name not in convs}
    return found | {name: _reordered(network.get_submodule(name), of, dim=1) for name, of in others.items()}


def exact_scheme(groups: Sequence[tuple[Kernel, int]]) -> Scheme:
    """The scheme of filters that are counted by shape."""
    return Scheme("exact", tuple((f"{h}x{w}", Fraction(count)) for (h, w), count in groups))


def _groups(layer: ShapedConv2d) -> list[tuple[Pair, int]]:
    """The number of filters of each shape."""
    return [(layer.starts[shape], count) for shape, count in sorted(Counter(layer.choice.tolist()).items())]


def _plain_conv(layer: ShapedConv2d, order: Tensor, arriving: Tensor | None) -> nn.Module:
    """A plain conv or composite, with the filters in their order and the inputs in theirs."""
    groups = _groups(layer)
    inputs = arriving if arriving is not None else torch.arange(layer.in_channels)
    new = laid_out_as(layer, exact_scheme(groups).build_form(layer.form)).train(layer.training)
    parts = order.split([count for _, count in groups])
    for target, (shape, _), filters in zip(weights_of(new), groups, parts, strict=True):
        target.copy_(layer.taps_of(filters, shape)[:, inputs])
    if layer.bias is not None:
        new.bias.copy_(layer.bias[order])  # type: ignore[operator, union-attr]
    return frozen_like(layer, new)


def _reordered(layer: nn.Module, places: Tensor, *, dim: int) -> nn.Module:
    """A norm, conv or linear layer with its channels in another order; its outputs stay as they are."""
    new = copy.deepcopy(layer)
    for key, tensor in new.state_dict().items():
        if tensor.dim() and not (dim and key == "bias"):
            tensor.copy_(tensor.index_select(dim, places.to(tensor.device)))
    return frozen_like(layer, new).train(layer.training)
