"""Fold what is linear into one layer, exactly: basis + join, separable pairs, and the batch norms behind layers.

Works on a copy of a network in evaluation. Every fold is computed in float64 and compared, on random inputs, with
what it replaces; the error is part of the report, `notes(network).merging`. What would not be exact is left apart,
and the report says why:

- a bias in front of zero padding: the padding is zero and not that bias, so the two differ at the border;
- two layers that both reach along one axis: a border cuts between them;
- channel groups that do not match: one conv would need more multiplications than both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.chains import InexactError, merge_chain
from lowrank_cnn.deploy.graph import successors
from lowrank_cnn.deploy.transforms import affine_bias, norm_affine, scale_filters
from lowrank_cnn.method.converting import copy_with, laid_out_as
from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d
from lowrank_cnn.method.selection import check_module
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note, notes

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, CompositeConv2d, FactoredConv2d)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Merging:
    """One layer: what went into it, and the largest error relative to the largest output, or why it stayed."""

    name: str
    parts: tuple[str, ...]
    error: float | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


def merge(
    model: nn.Module, *, chains: bool = True, norms: bool = True, example_input: Tensor | None = None
) -> nn.Module:
    """A copy of `model` with factored convs (chains) and batch norms (norms) folded where that is exact.

    A batch norm belongs to the layer in front of it only where a trace of the network shows so. With an example
    input, or for one of our own networks, the whole is compared too, and a difference is an error.
    """
    _check(model)
    after = successors(model) if norms else {}
    replaced: dict[nn.Module, nn.Module] = {}
    report = []
    for name, layer in _layers(model):
        norm = _norm_behind(model, after.get(name))
        new, row = _merged(name, layer, norm, after.get(name, ""), chains=chains)
        report += [row] if row else []
        if new is not None:
            replaced[layer] = new
            if norm is not None:
                replaced[norm] = nn.Identity().eval()
    merged = copy_with(model, replaced)
    note(merged, merging=(*report, *(_left_over(merged) if norms else ())))
    _compare_whole(model, merged, example_input)
    return merged


def _check(model: nn.Module) -> None:
    check_module(model)
    for name, module in model.named_modules():
        if module.training:
            label = f"{name} is" if name else "the network is"
            raise LowRankError(
                f"{label} in training mode, where batch norm is not linear: call model.eval() first."
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("the network has no weights to merge: it is on the meta device.")


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that something may be folded into; a chain is one layer."""
    parts = {id(part) for m in model.modules() if isinstance(m, FactoredConv2d) for part in list(m.modules())[1:]}
    for name, module in model.named_modules():
        hooked = module._forward_hooks or module._forward_pre_hooks
        if type(module) in _FOLDABLE and id(module) not in parts and not hooked:
            yield name, module


def _norm_behind(model: nn.Module, name: str | None) -> nn.Module | None:
    norm = model.get_submodule(name) if name else None
    return norm if type(norm) in _NORMS and norm.running_mean is not None else None  # type: ignore[union-attr]


def _left_over(merged: nn.Module) -> Iterator[Merging]:
    for name, module in merged.named_modules():
        if type(module) in _NORMS:
            yield Merging(name, (type(module).__name__,), reason="no layer is seen to feed it, and it alone")


def _merged(
    name: str, layer: nn.Module, norm: nn.Module | None, norm_name: str, *, chains: bool
) -> tuple[nn.Module | None, Merging | None]:
    """What stands for a layer (None: itself) and the line about it (None: there is nothing to say)."""
    parts, reason, new = [type(layer).__name__], "", None
    if isinstance(layer, FactoredConv2d):
        parts = [key for key, _ in layer.named_children()]
        try:
            new = merge_chain(layer) if chains else None
        except InexactError as why:
            reason = str(why)
    if norm is not None:
        parts.append(norm_name)
        new = _fold(new or copy.deepcopy(layer).cpu().double(), copy.deepcopy(norm).cpu().double())
    if new is None:
        return None, Merging(name, tuple(parts), reason=reason) if reason else None
    old = next(layer.parameters())
    new = laid_out_as(layer, new).eval().requires_grad_(old.requires_grad)
    error = _error(layer, norm, new)
    if error > _TOLERANCE.get(old.dtype, 0.1):
        raise LowRankError(
            f"merging {name} is off by {error:.1e}: this is a fault of lowrank_cnn, please report it."
        )
    return new, Merging(name, tuple(parts), error, reason)


def _fold(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """Put a batch norm into the layer in front of it; of a chain, into its last layer."""
    last: Any = list(layer.children())[-1] if isinstance(layer, FactoredConv2d) else layer
    scale, shift = norm_affine(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)  # type: ignore[arg-type]
    composite = isinstance(last, CompositeConv2d)
    weights, scales = (list(last.weights), last.by_group(scale)) if composite else ([last.weight], [scale])
    with torch.no_grad():
        for weight, part in zip(weights, scales, strict=True):
            weight.copy_(scale_filters(weight, part))
        last.bias = nn.Parameter(affine_bias(last.bias, scale, shift))  # type: ignore[arg-type]
    return layer


@torch.no_grad()
def _error(layer: nn.Module, norm: nn.Module | None, new: nn.Module) -> float:
    """The largest difference on random inputs, against the original in float64, relative to its largest output."""
    original = nn.Sequential(*(copy.deepcopy(m).cpu().double() for m in (layer, norm) if m is not None))
    x = torch.randn(_input_shape(layer), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = original(x)
    parameter = next(new.parameters())
    given = new(x.to(parameter.device, parameter.dtype)).cpu().double()
    return float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def _input_shape(layer: nn.Module) -> tuple[int, ...]:
    """Small, but wide enough for every tap and border of the layer."""
    if isinstance(layer, nn.Linear):
        return 3, layer.in_features
    stages = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
    spans = [_span(stage) for stage in stages]
    return 2, stages[0].in_channels, *(9 + 2 * sum(axis) for axis in zip(*spans, strict=True))  # type: ignore[return-value]


def _span(layer: nn.Module) -> list[int]:
    """How far a conv looks along each axis, padding included."""
    if isinstance(layer, CompositeConv2d):
        kernel, pads = layer.composite.kernel, [max(sides) for sides in layer.padding]
    else:
        kernel = layer.kernel_size
        pads = [0] * len(kernel) if isinstance(layer.padding, str) else list(layer.padding)  # type: ignore[arg-type]
    return [step * (size - 1) + max(pad, 0) for step, size, pad in zip(layer.dilation, kernel, pads, strict=True)]  # type: ignore[arg-type]


@torch.no_grad()
def _compare_whole(model: nn.Module, merged: nn.Module, x: Tensor | None) -> None:
    size = notes(model).input_size
    if x is None and size is not None:
        like = next(model.parameters())
        x = torch.randn(1, *size, dtype=like.dtype, device=like.device)
    if x is None:
        return
    before, after = model(x), merged(x)
    if not isinstance(before, Tensor):
        return
    error = float((after - before).abs().max() / before.abs().max().clamp_min(1e-12))
    if error > _TOLERANCE.get(before.dtype, 0.1):
        raise LowRankError(f"the merged network differs by {error:.1e}: merge without norms, and compare again.")
