"""CIFAR-10: accuracy over seeds, and what was tried for it."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

from tables.form import RESULTS, markdown, source

ONCE = "Mean ± standard deviation over {} seeds; 50,000 images to train on, the test set used once, at the end."


def cifar10_paper() -> str:
    """The paper's table and ours, by its recipe."""
    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for (net, _), runs in sorted(_runs("paper").items()):
        stated, found = _stated(net), [100 * run["result"]["top1"] for run in runs]
        own = runs[0]["recipe"]["dropout"]
        dropout = 0.5 if own is None else own  # the network's
        accuracy = f"**{_mean_and_spread(found)}**"
        rows.append([f"`{net}`", *_size(runs), f"{stated:.2f}", accuracy, dropout])
    columns = ["network", "MACs", "parameters", "published %", "top-1 %", "dropout"]
    note = f"\n{ONCE.format(len(runs))} {runs[0]['result']['epochs']} epochs.\n"
    return markdown(columns, rows) + note + source("cifar10/paper/", runs[0]["environment"])


def cifar10_modern() -> str:
    """Dense and low-rank twins by one recipe: equal epochs, and equal training compute."""
    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for part in ("modern", "modern-equal-compute"):
        for (net, _), runs in _runs(part).items():
            first = runs[0]["result"]
            accuracy = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
            rows.append([f"`{net}`", *_size(runs), first["epochs"], f"**{accuracy}**"])
    columns = ["network", "MACs", "parameters", "epochs", "top-1 %"]
    return markdown(columns, rows) + f"\n{ONCE.format(len(runs))}\n" + source("cifar10/", runs[0]["environment"])


def cifar10_init() -> str:
    """The initialisations without and with batch norm: accuracy after ten epochs."""
    cells: dict[str, dict[str, str]] = {}
    runs: list[dict[str, Any]] = []
    for (_, variant), runs in _runs("init").items():
        init, _, norm = variant.removesuffix("-norm").rpartition("-")
        cells.setdefault(init, {})[norm] = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
    rows = [[init, found["no"], found["batch"]] for init, found in sorted(cells.items())]
    note = f"\nTop-1 % after ten epochs, {len(runs)} seeds of each.\n"
    table = markdown(["initialisation", "no batch norm", "batch norm"], rows)
    return table + note + source("cifar10/init/", runs[0]["environment"])


def _runs(part: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records of a part of the CIFAR-10 experiment, by network and variant."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / "cifar10" / part).glob("*/record.json")):
        run = json.loads(path.read_text())
        variant = path.parent.name.removeprefix(run["model"]["name"]).rpartition("seed")[0].strip("-")
        found.setdefault((run["model"]["name"], variant), []).append(run)
    return found


def _size(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Multiply-accumulates per image, and parameters."""
    first = runs[0]["result"]
    return f"{first['macs'] / 1e6:.0f} M", f"{first['params'] / 1e3:.0f} k"


def _stated(net: str) -> float:
    """The accuracy that the paper states, in percent."""
    from lowrank_cnn.paper.published import published

    return 100 * (published()[net].top1 or 0)


def _mean_and_spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"
