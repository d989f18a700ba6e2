"""Low-rank forms of real trained filters at equal MACs: how much of the squared weight each one loses.

    pip install tensorly
    python -m benchmarks.tensor_fits [--network nin] [--shares 0.5 0.33 0.2]

For each spatial conv: our schemes `separable` and `channel`, Tucker-2 (1x1, kxk core, 1x1) over eleven ratios of
its two ranks, and CP (1x1, depthwise 1xk and kx1, 1x1), both by tensorly. The record is written after each row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.text import text_table
from lowrank_cnn.method.decompose import energy_curve
from lowrank_cnn.method.schemes import parse_scheme

OUT = Path(__file__).parent / "results" / "tensor_fits.json"
RATIOS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.6, 2.0, 3.0)
"""Ratios of Tucker-2's two ranks, each relative to its own number of channels."""
MOST = 320
"""Components of CP above which tensorly takes many minutes for one layer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", default="nin")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.33, 0.2])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    _tensorly("tensorly").set_backend("pytorch")
    about = {"network": options.network, "environment": environment() | {"tensorly": version("tensorly")}}
    rows: list[dict[str, Any]] = []
    for row in measured(lr.create_model(options.network, pretrained="cifar10"), options.shares):
        rows.append(row)
        options.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        print(row, flush=True)
    columns = ("layer", ">of the MACs", ">separable", ">channel", ">tucker2", ">cp")
    print(text_table(columns, [tuple(row.values()) for row in rows]))


def measured(net: nn.Module, shares: list[float]) -> Iterator[dict[str, Any]]:
    """A row for each spatial conv and share: the squared weight that each form loses; None where not fitted."""
    for name, conv in net.named_modules():
        if isinstance(conv, nn.Conv2d) and min(conv.kernel_size) > 1:
            for share in shares:
                most = share * conv.weight.numel()
                weight = conv.weight.detach().double()
                ours = {scheme: _ours(conv, scheme, most) for scheme in ("separable", "channel")}
                theirs = {"tucker2": _tucker(weight, most), "cp": _cp(weight, most)}
                yield {"layer": name, "share": share, **ours, **theirs}


def _ours(conv: nn.Conv2d, text: str, most: float) -> float | None:
    scheme = parse_scheme(text)
    sizes = [m for m in range(1, conv.weight.numel()) if replace(scheme, m=m).macs(conv) <= most]
    return 1 - energy_curve(conv, scheme)(sizes[-1]) if sizes else None


def _tucker(weight: Tensor, most: float) -> float | None:
    partial_tucker = _tensorly("tensorly.decomposition").partial_tucker
    multi_mode_dot = _tensorly("tensorly.tenalg").multi_mode_dot
    filters, channels, *kernel = weight.shape
    found = []
    for ratio in RATIOS:
        ranks = [(min(filters, max(1, round(r * filters / channels * ratio))), r) for r in range(1, channels + 1)]
        taps = kernel[0] * kernel[1]
        paid = [(a, b) for a, b in ranks if channels * b + taps * a * b + a * filters <= most]
        if paid:
            (core, factors), _ = partial_tucker(weight, rank=list(paid[-1]), modes=[0, 1], n_iter_max=30)
            found.append(_lost(weight, multi_mode_dot(core, factors, modes=[0, 1])))
    return min(found, default=None)


def _cp(weight: Tensor, most: float) -> float | None:
    parafac, cp_to_tensor = _tensorly("tensorly.decomposition").parafac, _tensorly("tensorly").cp_to_tensor
    components = int(most / sum(weight.shape))
    if components > MOST:
        return None
    fitted = parafac(weight, rank=components, init="random", random_state=0, n_iter_max=60, tol=1e-6)
    return _lost(weight, cp_to_tensor(fitted))


def _tensorly(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise lr.MissingExtra("Tucker and CP fits need tensorly: pip install tensorly") from error


def _lost(weight: Tensor, fitted: Tensor) -> float:
    return float((weight - fitted).square().sum() / weight.square().sum())


if __name__ == "__main__":
    with torch.no_grad():
        main()
