"""Whole networks within a share of the MACs: low-rank, thinner, and mixed, as advised layer by layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import nn

from lowrank_cnn.deploy.layer_forms import LOW_RANK, THINNER, LayerAdvice
from lowrank_cnn.method.converting import convert
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.thinning import thin
from lowrank_cnn.system.errors import LowRankError, LowRankWarning

MIXED = "mixed"
_MULTIPLE = 8

Build = Callable[[float], nn.Module | None]
"""Makes a network for a share of the MACs, or None where none can be made."""


def form_builders(model: nn.Module, size: tuple[int, ...], layers: Sequence[LayerAdvice]) -> dict[str, Build]:
    """How each form is made for a share of the MACs; one that cannot be made gives None."""
    strips = [row.name for row in layers if row.choice == LOW_RANK]
    forms: dict[str, Build] = {
        LOW_RANK: lambda share: _low_rank(model, size, share, None),
        THINNER: lambda share: _thinner(model, size, share),
    }
    if 0 < len(strips) < len(layers):
        forms[MIXED] = lambda share: _low_rank(model, size, share, strips)
    return {name: _or_none(build) for name, build in forms.items()}


def _or_none(build: Build) -> Build:
    def made(share: float) -> nn.Module | None:
        with warnings.catch_warnings(action="ignore", category=LowRankWarning):  # forms are measured
            try:
                return build(share)
            except LowRankError:
                return None

    return made


def why_none(model: nn.Module, size: tuple[int, ...], share: float) -> str:
    """Why a network cannot be made thinner to a share of the MACs, which all forms come to; empty if it can."""
    try:
        _thinner(model, size, share)
    except LowRankError as error:
        return str(error).rstrip(".")
    return ""


def _low_rank(model: nn.Module, size: tuple[int, ...], share: float, where: list[str] | None) -> nn.Module:
    """Strips in all layers, or in some; where that does not save enough, all layers are thinner as well."""
    if where is None:
        try:
            return convert(model, "lr", macs=share, input_size=size)
        except LowRankError:
            pass
    cheaper = count(convert(model, "lr", where=where, input_size=size), size).macs / count(model, size).macs
    return convert(_thinner(model, size, min(1.0, share / cheaper)), "lr", where=where, input_size=size)


def _thinner(model: nn.Module, size: tuple[int, ...], share: float) -> nn.Module:
    """A thinner network of at most this share: `thin` gives the nearest, which may lie above."""
    allowed = share * count(model, size).macs
    for part in (1.0, 0.9, 0.7, 0.5, 0.3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowRankWarning)  # whether the MACs will do is decided here
            found = thin(model, macs=part * share, input_size=size, multiple=_MULTIPLE)
        if count(found, size).macs <= allowed:
            return found
    raise LowRankError(f"no thinner network has {share:.3f} of the MACs.")
