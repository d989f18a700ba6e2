"""Dense twins: the dense network that a low-rank one is compared with, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.converting import rows_of
from lowrank_cnn.method.counting import LayerCount, count
from lowrank_cnn.method.inputs import InputSize
from lowrank_cnn.method.rewriting import Change, changes_of, low_rank_layers
from lowrank_cnn.models.families import build_network
from lowrank_cnn.models.network import Network
from lowrank_cnn.system.provenance import notes

_BASELINES = ("vgg11-gmp", "vgg11", "googlenet", "nin", "resnet18-small", "resnet18", "airbench")
"""Dense networks; where one's name begins with another's, the longer comes first."""


def baseline_of(name: str) -> str:
    """The dense network of a family, the first that a name begins with; any other name is its own."""
    return next((dense for dense in _BASELINES if name == dense or name.startswith(f"{dense}-")), name)


def dense_twin(model: nn.Module) -> Network | None:
    """The dense network to compare one of ours with, of the same width, norm, stride and classes.

    None for a network that is not ours, or that is its own twin.
    """
    if not isinstance(model, Network):
        return None
    config, name = model.config, str(model.config["name"])
    dense = baseline_of(name)
    if name == dense and config["scheme"] is None and notes(model).conversion is None:
        return None
    return build_network(**{**config, "name": dense, "scheme": None})


def dense_cost(model: nn.Module, input_size: InputSize) -> tuple[int, int] | None:
    """Multiply-accumulates and parameters of a network before it was converted; its own where it never was.

    None if it has low-rank layers that no recorded conversion made: what they replaced is unknown.
    """
    changed = changes_of(model)
    if low_rank_layers(model).keys() - {change.name for change in changed}:
        return None
    model = fold_branches(model)  # as it is counted
    cost = count(model, input_size)
    macs, params = cost.macs, cost.params
    for change in changed:
        layer = model.get_submodule(change.name)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # narrower than before, and without MACs
            params += change.params_before - change.params_after
            continue
        rows = rows_of(cost.layers, change.name)
        if not rows:  # it does not run on the way to the output
            return None
        macs += _macs_before(model, change, rows) - sum(row.macs for row in rows)
        params += change.params_before - sum(row.params for row in rows)
    return macs, params


def _macs_before(model: nn.Module, change: Change, rows: Sequence[LayerCount]) -> int:
    """The last stage of a replacement gives the pixels of the conv that it replaced.

    A transposed conv works on the pixels of its input, as the first stage of its replacement does.
    """
    transposed = isinstance(model.get_submodule(rows[0].name), _ConvTransposeNd)
    worked = rows[0] if transposed else rows[-1]
    pixels = worked.macs // (worked.params - _biases(model, worked))
    return pixels * (change.params_before - _biases_before(model, change, rows[-1]))


def _biases_before(model: nn.Module, change: Change, last: LayerCount) -> int:
    """The biases of a layer that was replaced: as many as it had filters, of which some may be gone, or none.

    Folding branches or a norm adds a bias. So a conv of several taps is known by its parameters: a filter without
    a bias has as many for each tap.
    """
    kernel, _, filters = change.before.rpartition(",")
    taps = prod(map(int, kernel.split("x"))) if kernel.replace("x", "").isdecimal() else 1
    has_bias = change.params_before // int(filters) % taps if taps > 1 else _biases(model, last)
    return int(filters) if has_bias else 0


def _biases(model: nn.Module, row: LayerCount) -> int:
    return sum(p.numel() for p in model.get_submodule(row.name).parameters() if p.dim() == 1)
