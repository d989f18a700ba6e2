"""Rewrite the spatial convolutions of any network by a scheme, and say what changed.

The caller's network is never touched. The `notes` of the new one hold its `conversion`: what was rewritten, what
stayed, and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowrank_cnn.core.errors import LowRankError, LowRankWarning, option
from lowrank_cnn.core.modules import InputSize, known_inputs
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.kernels.fused_convs import fused_layer
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.budget import Budget, fresh_options, layer_curves, within
from lowrank_cnn.method.count import LayerCount, count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import Change, Conversion, Fill, changes_of, check_calls, low_rank_layers, rewrite
from lowrank_cnn.method.schemes import FactoredConv2d, Scheme, is_depthwise, parse_scheme
from lowrank_cnn.method.select import Kept, NothingToConvertError, Where, select

__all__ = ["Change", "Conversion", "Cost", "Fill", "conversion_costs", "convert", "notes", "rewrite"]


BY_BUDGET = ("lr", "mixture(kx1=3, 1xk=3, kxk=2)", "mixture(kx1, 1xk, kxk=2)", "lr-join")
"""The schemes that a budget chooses from where none is named: strips, strips beside full filters, fewer strips."""


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates and parameters of a layer, or of a whole network, before and after."""

    name: str
    macs_before: int
    macs_after: int
    params_before: int
    params_after: int


def convert(
    model: nn.Module,
    scheme: str | Scheme | None = None,
    *,
    where: Where = None,
    init: str | Fill = "composite",
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    input_size: InputSize | None = None,
    allow_costlier: bool = False,
) -> nn.Module:
    """A copy of `model` whose spatial convs are replaced as `scheme` says.

    Without a scheme, a budget chooses one for each layer: `lr`, mixtures with full filters, or `lr-join`.

    - `where`: None for every conv with all sides longer than one pixel, except projections of patches; a name, a
      prefix (`layer3`) or a pattern (`*.conv2`); a kernel (3 or (3, 5)); a list of these, such as one of
      `stages(model)`; `f(name, conv) -> bool`.
    - `init`: "composite" for fresh weights of the variance that the paper derives, or a function that gives a
      replacement its weights; `decompose` fits them to the trained ones.
    - `macs`, `params` or `latency`: at most one budget, as a share of what the network costs now. It chooses which
      layers are rewritten and, for schemes with basis filters, how many a layer gets; the others stay dense.
      Layers lose most where that saves most. `latency` is measured here, on one image.
    - `input_size`: (channels, height, width) of an image; a budget needs it, unless the network is one of ours.
      If it is given, the new network runs once, to check that it calls the new layers.
    - `allow_costlier`: rewrite also a layer that would not get cheaper, which stays otherwise.

    3-D convs take `lr` (a third each of strips along time, height and width), `2+1`, and shapes of three sides.
    Depthwise, 1x1, 1xk, transposed and 1-D convs stay, and so does a conv whose class computes something else
    than `nn.Conv2d` or `nn.Conv3d`, and one that is frozen: the `notes` of the result say why. Dtype,
    device, memory format and training mode are those of the conv replaced; the bias goes to the last layer of a
    chain. A layer that is used in several places stays one layer.
    A warning names layers that no fused kernel runs, as with channel groups: these can be slower than the dense.

    >>> convs = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    >>> net = nn.Sequential(convs[0], nn.ReLU(), convs[1])
    >>> half = convert(net, "lr-join", macs=0.5, input_size=(16, 32, 32))
    >>> count(half, (16, 32, 32)).macs <= 0.5 * count(net, (16, 32, 32)).macs
    True
    """
    budget = Budget.of(macs=macs, params=params, latency=latency)
    if scheme is None and budget is None:
        raise LowRankError("give a scheme, such as lr, or a budget that chooses schemes: macs, params or latency.")
    candidates = [parse_scheme(text) for text in (BY_BUDGET if scheme is None else (scheme,))]
    scheme = candidates[0]
    if scheme.refusal:
        raise LowRankError(scheme.refusal)
    if init != "composite" and not callable(init):
        raise LowRankError(f'init is "composite" or a function that fills a replacement, not {init!r}.')
    convs, kept = select(model, scheme, where, trained_on=init == "composite")
    schemes = dict.fromkeys(convs, scheme)
    if budget is not None:
        size = known_inputs(model, input_size)
        options = {name: fresh_options(conv, candidates) for name, conv in convs.items()}
        curves, rest = layer_curves(model, convs, budget.kind, size, options.__getitem__)
        schemes = within(model, curves, rest, budget, size)
        reason = "the budget leaves it dense"
        kept += tuple(Kept(name, type(conv).__name__, reason) for name, conv in convs.items())
    elif not allow_costlier:
        schemes, costlier = cheaper_only(convs, schemes)
        kept += costlier
    if not schemes:
        raise NothingToConvertError(nothing_cheaper(scheme))
    new = rewrite(model, schemes, fill=init if callable(init) else None, kept=kept)
    check_layers(model, new, schemes, input_size, budget)
    return new


def check_layers(
    model: nn.Module, new: nn.Module, names: Iterable[str], input_size: InputSize | None, budget: Budget | None
) -> None:
    """Check that a network calls its new layers; warn of those that no fused kernel can run.

    Torch's convs for these are often slower on a GPU. Under a budget of latency that was measured.
    """
    if input_size is not None:
        check_calls(model, new, list(names), input_size)
    if budget is not None and budget.kind == "latency":
        return
    layers = low_rank_layers(new)
    ours = [fold_branches(layers[name]) for name in names if name in layers]
    convs = [layer for layer in ours if isinstance(layer, CompositeConv2d | FactoredConv2d)]
    slow = [layer for layer in convs if fused_layer(layer) is None and not _runs_bands(layer)]
    kinds = CompositeConv2d | nn.Conv2d | nn.Conv3d
    parts: list[Any] = [part for layer in slow for part in layer.modules() if isinstance(part, kinds)]
    reasons = {
        "channel groups": any(getattr(part, "channel_groups", part.groups) > 1 for part in parts),
        "dilation": any(max(part.dilation) > 1 for part in parts),
        "padding other than zeros": any(part.padding_mode != "zeros" for part in parts),
    }
    if slow:
        why = " or ".join(reason for reason, found in reasons.items() if found)
        told = (
            f"no fused kernel runs {len(slow)} of {counted(len(convs), 'low-rank layer')} ({why}), which on a GPU "
            "can train and run slower than dense ones: time_model measures it, and `where` leaves layers dense."
        )
        warnings.warn(told, LowRankWarning, stacklevel=3)


def _runs_bands(layer: CompositeConv2d | FactoredConv2d) -> bool:
    """Whether the depthwise kernels run a layer, or both convs of a separable one."""
    if isinstance(layer, FactoredConv2d):
        convs = [part for part in layer if isinstance(part, nn.Conv2d) and is_depthwise(part)]
        return len(convs) == len(layer) and all(conv.padding_mode == "zeros" for conv in convs)
    return layer.composite.depthwise and layer.padding_mode == "zeros"


def cheaper_only(
    convs: Mapping[str, nn.Conv2d], schemes: Mapping[str, Scheme]
) -> tuple[dict[str, Scheme], tuple[Kept, ...]]:
    """The schemes that make their conv cheaper in MACs, and why the other convs stay."""
    cheaper, kept = {}, []
    for name, scheme in schemes.items():
        share = scheme.relative_cost(convs[name])
        if share < 1 or not scheme.saves:
            cheaper[name] = scheme
        else:
            kept.append(Kept(name, type(convs[name]).__name__, f"{scheme} would cost {share:.2f} of its MACs"))
    return cheaper, tuple(kept)


def nothing_cheaper(scheme: Scheme) -> str:
    other = option("allow_costlier", True)
    return f"{scheme} makes no layer cheaper: ask for fewer filters or less energy, or give {other}."


def conversion_costs(before: nn.Module, after: nn.Module, input_size: InputSize) -> tuple[Cost, ...]:
    """The cost of each layer that was rewritten, or made thinner, on one image; in the last row the total.

    >>> from torch import nn
    >>> import lowrank_cnn as lr
    >>> dense = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
    >>> total = lr.conversion_costs(dense, lr.convert(dense, "lr"), (8, 16, 16))[-1]
    >>> total.macs_before // total.macs_after
    3
    """
    old, new = (count(model, input_size) for model in (before, after))
    costs = []
    thinning = notes(after).thinning
    for name in [change.name for change in changes_of(after)] or (thinning.channels if thinning else ()):
        rows = [rows_of(found.layers, name) for found in (old, new)]
        macs = [sum(row.macs for row in found) for found in rows]
        costs.append(Cost(name, *macs, *(sum(row.params for row in found) for found in rows)))
    return *costs, Cost("total", old.macs, new.macs, old.params, new.params)


def rows_of(layers: Sequence[LayerCount], name: str) -> list[LayerCount]:
    """The rows of a layer and of its parts; all rows for the network itself, which has no name."""
    return [row for row in layers if not name or row.name == name or row.name.startswith(f"{name}.")]
