"""Measure how much of a network's output, or of its score, remains when one layer is decomposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from lowrank_cnn.method.activations import output_error, outputs, refit, seen, window_covariance
from lowrank_cnn.method.building import FactoredConv2d
from lowrank_cnn.method.channel import FactoredLayer
from lowrank_cnn.method.fitting import fit_layer
from lowrank_cnn.method.ranks import Keeps, between, sizes_of
from lowrank_cnn.method.rewriting import copy_with, replacement
from lowrank_cnn.method.scheme import Scheme
from lowrank_cnn.system.errors import LowRankError

Score = Callable[[nn.Module], float]
"""The quality of a network, such as its accuracy: positive, and higher for a better network."""
_TRIED = 6
"""Numbers of basis filters that are tried for a layer; between them, the share kept is interpolated."""


@torch.no_grad()
def measured_keeps(
    model: nn.Module,
    convs: Mapping[str, nn.Conv2d],
    scheme: Scheme,
    batches: Sequence[Tensor],
    score: Score | None = None,
    *,
    refitting: bool = True,
) -> dict[str, Keeps]:
    """For each layer, what the network keeps with m basis filters in that layer alone.

    By images it is one less the relative squared error of the output, each layer refitted as in the end (unless
    `refitting` is off); by a `score` it is the score over that of the original.
    """
    right = outputs(model, batches) if batches else None
    whole = _scored(score, model) if score else 1.0
    if not 0 < whole < math.inf:
        raise LowRankError(f"evaluate scores the network itself with {whole}: a score is positive.")
    keeps = {}
    for name, conv in convs.items():
        points = []
        given = seen(model, conv, batches) if batches and refitting else []
        for m in dict.fromkeys(sizes_of(conv, scheme, _TRIED)):
            layer = data_fitted(name, conv, replace(scheme, m=m), given)
            trial = copy_with(model, {conv: layer})
            if score is not None:
                kept = _scored(score, trial) / whole
            else:
                assert right is not None
                kept = 1 - output_error(outputs(trial, batches), right)
            points.append((m, min(max(kept, 1e-9), 1.0)))
        rising = accumulate((kept for _, kept in points), max)  # more filters never count for less
        keeps[name] = between([(m, kept) for (m, _), kept in zip(points, rising, strict=True)])
    return keeps


@torch.no_grad()
def data_fitted(name: str, conv: nn.Conv2d, scheme: Scheme, given: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """A replacement fitted to the weights of a conv and, where they are given, to its inputs and outputs."""
    layer = replacement(conv, scheme)
    inputs = [x for x, _ in given]
    separable = scheme.name == "separable"
    covariance = window_covariance(layer, inputs) if given and separable else None  # type: ignore[arg-type]
    fit_layer(name, conv, layer, covariance)
    if given and isinstance(layer, FactoredConv2d | FactoredLayer):
        refit(layer, inputs, [y for _, y in given])
    return layer


def _scored(score: Score, model: nn.Module) -> float:
    value = score(copy_with(model))
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise LowRankError(f"evaluate gives a number, more for a better network, not {value!r}.")
    return float(value)
