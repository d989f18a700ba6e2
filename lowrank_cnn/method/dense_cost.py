"""What a network would cost with ordinary convolutions, as far as the network itself tells."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lowrank_cnn.method.converting import rows_of
from lowrank_cnn.method.counting import LayerCount, count
from lowrank_cnn.method.rewriting import Change, changes_of, low_rank_layers


def dense_cost(model: nn.Module, input_size: Sequence[int]) -> tuple[int, int] | None:
    """Multiply-accumulates and parameters of a network before it was converted; its own where it never was.

    None where it holds low-rank layers that no conversion speaks of: what they stand for is then not known.
    """
    changed = changes_of(model)
    if low_rank_layers(model).keys() - {change.name for change in changed}:
        return None
    cost = count(model, input_size)
    macs, params = cost.macs, cost.params
    for change in changed:
        rows = rows_of(cost.layers, change.name)
        if not rows:  # it does not run on the way to the output
            return None
        macs += _macs_before(model, change, rows[-1]) - sum(row.macs for row in rows)
        params += change.params_before - sum(row.params for row in rows)
    return macs, params


def _macs_before(model: nn.Module, change: Change, last: LayerCount) -> int:
    """The last stage of a replacement gives the pixels of the conv that it replaced."""
    stage = model.get_submodule(last.name)
    biases = [p.numel() for p in stage.parameters() if p.dim() == 1]
    pixels = last.macs // (last.params - sum(biases))
    return pixels * (change.params_before - sum(biases))
