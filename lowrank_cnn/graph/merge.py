"""Fold linear layers exactly into one: batch norms into the layer before them, and chains (basis + join, pairs).

`merge` works on a copy of a network in evaluation. A captured graph must show that a norm reads only one layer,
and that nothing else reads that layer's result. Every fold is computed in float64 and compared with the layers
that it replaces; then the whole network is compared with the original. Layers whose fold is not exact, or cannot
be compared, stay, and `notes(network).merging` gives the reason:

- a bias before zero padding: the padding is zero and not that bias, so the two differ at the border;
- two layers that both reach along one axis: a border cuts between them;
- channel groups that do not match: one conv would need more multiplications than both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import copied, difference, objection, tolerance, unchanged
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import watched
from lowrank_cnn.core.notes import AsDict, note, notes
from lowrank_cnn.graph.capture import TRANSPOSED, CaptureError, NetworkGraph, capture, captures, layer_kind
from lowrank_cnn.graph.examples import Example, by_position, example_for, in_signature
from lowrank_cnn.graph.patterns import NORMS, Pattern, find_patterns, split_norm
from lowrank_cnn.kernels.reference import compose
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d, Sides, conv_of, enclosing_padding, weights_of
from lowrank_cnn.method.rewrite import copy_with, laid_out_as
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.select import check_rewritable
from lowrank_cnn.method.spec import Composite, FilterGroup


@dataclass(frozen=True)
class Merging(AsDict):
    """A layer: its parts, and the largest error relative to the largest output, or why it stayed."""

    name: str
    parts: tuple[str, ...]
    error: float | None = None
    reason: str = ""


class InexactError(Exception):
    """Two convs do not equal one; the message gives the reason."""


def merge_chain(chain: FactoredConv2d) -> nn.Module:
    """The single conv that equals a chain, in float64 on the CPU; raises `InexactError` if there is none."""
    return reduce(_joined, (copy.deepcopy(stage).cpu().double() for stage in chain))


@torch.no_grad()
def _joined(first: Any, second: Any) -> nn.Module:
    """Two convs as one whose kernel is the product of theirs, or the reason why not."""
    strips = first.groups == 1 and second.groups == second.in_channels == second.out_channels  # one per channel
    if first.groups != second.groups and not strips:
        raise InexactError("its channel groups do not match: one conv would cost more than both")
    axes = range(len(first.stride))
    if any(_reaches(first, axis) and _reaches(second, axis) for axis in axes):
        raise InexactError("both of its layers reach along the same axis")
    pads = [any(side > 0 for both in _sides(conv) for side in both) for conv in (first, second)]
    if all(pads) and first.padding_mode != second.padding_mode:
        raise InexactError("its layers pad in different ways")
    biased = first.bias is not None and bool(first.bias.any())
    if biased and pads[1] and second.padding_mode == "zeros":
        raise InexactError("the first layer's bias meets the zero padding of the second")
    before, after, bias = first.weight, second.weight, second.bias
    if first.bias is not None:  # which the second conv multiplies and sums
        seen = after.flatten(2).sum(2).reshape(second.groups, -1, after.shape[1])
        carried = torch.einsum("gdm,gm->gd", seen, first.bias.reshape(second.groups, -1)).flatten()
        bias = carried if bias is None else carried + bias
    along = [second if _reaches(second, axis) else first for axis in axes]
    weight = before * after if strips else compose(before, after, groups=first.groups)
    filters, depth, *kernel = weight.shape
    new: Any = conv_of(
        depth * first.groups,
        Composite((FilterGroup(*kernel, filters),)),
        stride=tuple(conv.stride[axis] for axis, conv in enumerate(along)),
        dilation=tuple(conv.dilation[axis] for axis, conv in enumerate(along)),
        padding=tuple(_sides(conv)[axis] for axis, conv in enumerate(along)),
        channel_groups=first.groups,
        padding_mode=(second if pads[1] else first).padding_mode,
        bias=bias is not None,
    ).to(weight)
    weights_of(new)[0].copy_(weight)
    if bias is not None:
        new.bias.copy_(bias)
    return new


def _sides(conv: Any) -> Sides:
    return enclosing_padding(conv.padding, conv.kernel_size, conv.dilation)


def _reaches(conv: Any, axis: int) -> bool:
    """Whether an output reads other pixels than its own along this axis."""
    return conv.kernel_size[axis] > 1 or conv.stride[axis] > 1 or _sides(conv)[axis] != (0, 0)


class FoldedLinear(nn.Identity):
    """Replaces a batch norm that was folded into a linear layer, which is exact only for a batch of vectors."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            raise LowRankError(
                "a batch norm was folded into the linear layer before it for inputs of two dimensions, not of "
                f"{input.dim()}: merge with an example_input of that shape."
            )
        return input


def fold(layer: nn.Module, norm: Any) -> nn.Module:
    """Fold a batch norm, which scales and shifts channels, into the layer before it."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    shift = shift if norm.bias is None else shift + norm.bias
    return rescaled(layer, scale, shift)


def rescaled(layer: nn.Module, scale: Tensor, shift: Tensor | None = None) -> nn.Module:
    """Scale and shift the channels of a layer's result, by changing its weights; in a chain, those of its last."""
    last: Any = list(layer.children())[-1] if isinstance(layer, FactoredConv2d) else layer
    composite = isinstance(last, CompositeConv2d)
    if composite and len(last.weights) < len(last.composite.groups):
        layer = last = last.with_points()  # an identity has no weight to scale
    weights, scales = (list(last.weights), last.by_group(scale)) if composite else ([last.weight], [scale])
    with torch.no_grad():
        for weight, factor in zip(weights, scales, strict=True):
            if isinstance(last, TRANSPOSED):  # its filters lie along the second dimension, group by group
                factor = factor.reshape(last.groups, 1, -1, *[1] * (weight.dim() - 2))
                weight.copy_((weight.unflatten(0, (last.groups, -1)) * factor).flatten(0, 1))
            else:
                weight.copy_(weight * factor.reshape(-1, *[1] * (weight.dim() - 1)))
        bias = last.bias if last.bias is None else last.bias * scale
        bias = shift if bias is None else bias if shift is None else bias + shift
        last.bias = None if bias is None else nn.Parameter(bias)
    return layer


@torch.no_grad()
def fold_error(layer: nn.Module, norm: nn.Module | None, new: nn.Module) -> float:
    """The largest difference on random inputs, against the original in float64, relative to its largest output."""
    like = next(new.parameters())
    device = like.device if like.is_cuda else torch.device("cpu")  # others may lack float64
    parts = (copy.deepcopy(part).to(device, torch.float64) for part in (layer, norm) if part is not None)
    x = torch.randn(_input_shape(layer), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return difference(new(x.to(like.device, like.dtype)), nn.Sequential(*parts)(x.to(device)))


def _input_shape(layer: Any) -> tuple[int, ...]:
    """Small, but wide enough for every tap and border of the layer."""
    if isinstance(layer, nn.Linear):
        return 3, layer.in_features
    stages: list[Any] = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
    spans = []
    for stage in stages:  # how far it looks along each axis, padding included
        pads = [0] * len(stage.stride) if isinstance(stage.padding, str) else map(max, _sides(stage))
        axes = zip(stage.dilation, stage.kernel_size, pads, strict=True)
        spans.append([d * (k - 1) + max(p, 0) for d, k, p in axes])
    return 1, stages[0].in_channels, *(3 + 2 * sum(axis) for axis in zip(*spans, strict=True))


_KINDS = ("conv", "transposed conv", "linear", "composite", "chain")
_ELSEWHERE = "its forward depends on the size of its input, or on options"
_READ = "with other inputs its forward reads weights that would be merged"
_NOT_FED, _NOT_RUN = "no layer feeds it and nothing else", "it does not run in evaluation"


@unchanged()  # layers draw weights when they are built
def merge(
    model: nn.Module, *, chains: bool | None = None, norms: bool = True, example_input: Example | None = None
) -> nn.Module:
    """A copy of `model` with its batch norms folded into the layers before them, if that is exact.

    - `chains`: True merges every chain (basis and join, separable pair) into one dense conv, which gives back the
      multiply-accumulates that it saved; False merges none; None those that get cheaper.
    - `norms`: whether batch norms are folded.
    - `example_input`: an input, a tuple of all inputs (it may end in keywords), or a dictionary of keywords. The
      result is compared with the original on it. Without one, an input of the network's known size is made, or
      of the size that its first layer suggests.

    The result is right for every call, whichever optional inputs it gives: a norm that some calls skip stays. If
    the path depends on attributes (`self.norms[self.domain]`), folds hold for their current values. Training-only
    branches (`method.branches`) are folded too. Nothing is merged without a known example, a traceable forward and
    equal results.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> merge(net)[1]
    Identity()
    """
    check_rewritable(model)
    if (training := next((name for name, part in model.named_modules() if part.training), None)) is not None:
        part = training or "the network"
        raise LowRankError(f"{part} is in training mode, where batch norm is not linear: call model.eval() first.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("the network has no weights to merge: it is on the meta device.")
    example = None if example_input is None else in_signature(model, example_input)
    outer, name = model, ""
    if isinstance(example, Mapping):  # inputs that go by keyword alone
        (outer, example, _), name = by_position(model, example), "network"
    elif layer_kind(model) is not None:  # a graph shows calls of parts
        outer, name = nn.Sequential(model).eval(), "0"
    whole = _merged_network(outer, chains, norms, example)
    merged, rows = whole.get_submodule(name), notes(whole).merging
    note(merged, merging=tuple(replace(row, name=row.name.removeprefix(name).removeprefix(".")) for row in rows))
    return merged


def _merged_network(model: nn.Module, chains: bool | None, norms: bool, example_input: Any) -> nn.Module:
    example, given = example_for(model, example_input), example_input is not None
    original, model = model, fold_branches(model)
    folded, parts = model, model.modules() if norms else ()
    if splits := {part: split for part in parts if (split := split_norm(part)) is not None}:
        model = copy_with(model, splits)
    try:
        if example is None:
            raise CaptureError("no example input is known to compare the result on: pass example_input")
        captured = capture(copy_with(model), *example)
        seen: dict[str, set[int]] = {}  # the dimensions of each norm's inputs
        watch = watched(_norms(model), lambda name, x: seen.setdefault(name, set()).add(x.dim()))
        with torch.no_grad(), unchanged(model), watch:
            model(*copied(*example))
        found = _Folds(model, captured, seen, chains=chains, norms=norms, given=given)
    except CaptureError as why:
        compared = folded is not original and example is not None and not objection(folded, original, *example)
        return _left_alone(folded if compared else original, str(why), norms=norms)
    replaced, report = found.all()
    merged = copy_with(model, replaced)
    changed = bool(replaced) or model is not original
    if changed and (reason := objection(merged, original, *example)):
        return _left_alone(original, f"merged, {reason}", norms=norms)
    if replaced and captured.calls is not None and (before := _every_call(model)):
        after = _every_call(merged)  # the example shows one kind of call alone
        if len(before) != len(after) or not all(map(NetworkGraph.computes_like, before, after)):
            return _left_alone(original, _READ, norms=norms)
    told = {row.name for row in report}
    for name, norm in _norms(merged).items() if norms else ():
        if name not in told:
            reason = _NOT_FED if name in seen else _NOT_RUN
            report.append(Merging(name, (type(norm).__name__,), reason=reason))
    note(merged, merging=tuple(report))
    return merged


def _every_call(model: nn.Module) -> list[NetworkGraph]:
    """A graph for each kind of call; empty if these are not known."""
    try:
        return captures(copy_with(model))
    except CaptureError:
        return []


@dataclass
class _Folds:
    """Everything that can be folded in a captured network."""

    model: nn.Module
    captured: NetworkGraph
    dimensions: dict[str, set[int]]
    chains: bool | None
    norms: bool
    given: bool
    known: dict[str, list[tuple[set[tuple[str, str]], set[str]]]] = field(default_factory=dict)
    """By module, for each kind of call its pairs of layer and norm, and all its calls; empty if not known."""

    def all(self) -> tuple[dict[nn.Module, nn.Module], list[Merging]]:
        """The replacement of each replaced module, and a row about every layer that changes or cannot."""
        replaced: dict[nn.Module, nn.Module] = {}
        report = []
        for pattern in find_patterns(self.captured, norms=self.norms, kinds=_KINDS):
            layer = self.model.get_submodule(pattern.name)
            norm_name = str(pattern.norm.target) if pattern.norm is not None else ""
            norm = self.model.get_submodule(norm_name) if norm_name else None
            reason = norm_name and (
                self._wrong_axis(pattern, layer, norm_name) or self._elsewhere(pattern.name, norm_name)
            )
            if norm is not None and reason:
                report.append(Merging(norm_name, (type(norm).__name__,), reason=reason))
                norm = None
            new, row = self._merged(pattern.name, layer, norm, norm_name)
            report += [row] if row else []
            if new is not None:
                replaced[layer] = new
                if norm is not None:
                    replaced[norm] = (FoldedLinear() if isinstance(layer, nn.Linear) else nn.Identity()).eval()
        return replaced, report

    def _wrong_axis(self, pattern: Pattern, layer: Any, norm: str) -> str:
        """Why a norm scales, or may scale, another axis than the layer's outputs; empty if it is the same axis."""
        axes = 0 if isinstance(layer, nn.Linear) else len(layer.stride)
        if self.dimensions.get(norm) != {2 + axes}:
            return "it normalises another axis than that of the layer before it"
        if not isinstance(layer, nn.Linear) or self.given:
            return ""
        node = pattern.input  # flattened just before, it has two dimensions
        names = (node.target, getattr(node.target, "__name__", ""))
        if node.op != "call_module" and "flatten" in names and node.args[1:] == (1,):
            return ""
        return "it normalises another axis where inputs have three dimensions: pass example_input"

    def _elsewhere(self, layer: str, norm: str) -> str:
        """Why another kind of call might skip a norm; empty if none can.

        A graph of one kind of call shows one path. The outermost module around both whose graph is known for every
        call must show the pair in each of its calls.
        """
        if self.captured.calls is None:
            return ""
        *within, _ = layer.split(".")
        for depth in range(len(within) + 1):
            parent = ".".join(within[:depth])
            if parent and not norm.startswith(f"{parent}."):
                break
            if parent not in self.known:
                graphs = _every_call(self.model.get_submodule(parent))
                self.known[parent] = [(_pairs(graph), graph.called()) for graph in graphs]
            if calls := self.known[parent]:
                there = tuple(name.removeprefix(f"{parent}.") for name in (layer, norm))
                fits = all(there in pairs or not called.intersection(there) for pairs, called in calls)
                return "" if fits else _ELSEWHERE
        return _ELSEWHERE

    def _merged(
        self, name: str, layer: nn.Module, norm: nn.Module | None, norm_name: str
    ) -> tuple[nn.Module | None, Merging | None]:
        """The replacement of a layer (None: it stays) and the row about it (None: there is nothing to say)."""
        parts, reason, new = [type(layer).__name__], "", None
        if isinstance(layer, FactoredConv2d):
            parts = [key for key, _ in layer.named_children()]
            new, reason = self._dense(layer)
        if norm is not None:
            parts.append(norm_name)
            new = fold(new or copy.deepcopy(layer).cpu().double(), copy.deepcopy(norm).cpu().double())
        if new is None:
            return None, Merging(name, tuple(parts), reason=reason) if reason else None
        old = next(layer.parameters())
        new = laid_out_as(layer, new).eval().requires_grad_(old.requires_grad)
        error = fold_error(layer, norm, new)
        if not error <= tolerance(old):
            return None, Merging(name, tuple(parts), reason=f"merging it would give an error of {error:.1e}")
        return new, Merging(name, tuple(parts), error, reason)

    def _dense(self, chain: FactoredConv2d) -> tuple[nn.Module | None, str]:
        """A chain as one conv in float64, or the reason why it stays a chain."""
        if self.chains is False:
            return None, ""
        try:
            dense = merge_chain(chain)
        except InexactError as why:
            return None, str(why) if self.chains else ""
        size = (chain.in_channels, *[56] * len(chain.stride))  # their costs are compared on such maps
        if self.chains is None and not count(dense, size).macs < count(chain, size).macs:
            return None, ""
        return dense, ""


def _left_alone(model: nn.Module, reason: str, *, norms: bool) -> nn.Module:
    """A copy in which nothing is merged, with the reason in every row."""
    same = copy_with(model)
    left = {name: part for name, part in same.named_modules() if isinstance(part, FactoredConv2d)}
    left |= _norms(same) if norms else {}
    rows = (Merging(name, (type(part).__name__,), reason=reason) for name, part in left.items())
    note(same, merging=tuple(rows))
    return same


def _pairs(captured: NetworkGraph) -> set[tuple[str, str]]:
    found = find_patterns(captured, norms=True, kinds=_KINDS)
    return {(pattern.name, str(pattern.norm.target)) for pattern in found if pattern.norm is not None}


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if type(part) in NORMS}
