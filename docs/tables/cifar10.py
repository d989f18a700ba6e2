"""CIFAR-10: accuracy over seeds, and what was tried for it."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

from tables.form import RESULTS, markdown, source


def cifar10_modern() -> str:
    """Dense and low-rank twins by one recipe: equal epochs, and equal training compute."""
    from lowrank_cnn.paper.published import published

    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for part in ("modern", "modern-equal-compute"):
        for (net, _), found in _runs(part).items():
            runs, first = found, found[0]["result"]
            cost = first["macs"] * first["epochs"] / 1e9
            accuracy = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
            stated = f"{100 * (published()[net].top1 or 0):.2f}"
            size = f"{first['macs'] / 1e6:.0f} M", f"{first['params'] / 1e3:.0f} k"
            found_and_stated = f"**{accuracy}**", len(runs), stated
            rows.append([f"`{net}`", *size, first["epochs"], f"{cost:.1f} G", *found_and_stated])
    columns = ["network", "MACs", "parameters", "epochs", "MACs x epochs", "top-1 %", "seeds", "published %"]
    note = (
        "\nMean ± standard deviation over seeds; 50,000 images to train on, the test set met once, at the end.\n"
    )
    return markdown(columns, rows) + note + source("cifar10/", runs[0]["environment"])


def cifar10_init() -> str:
    """The initialisations with and without batch norm: loss on the way, accuracy at the end."""
    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for (_, variant), found in _runs("init").items():
        runs = found
        losses = [mean(run["history"][epoch - 1]["train_loss"] for run in runs) for epoch in (1, 3, 10)]
        accuracy = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
        init, _, norm = variant.removesuffix("-norm").rpartition("-")
        init = init.removesuffix("-batch").removesuffix("-no")
        rows.append([init, norm, *(f"{loss:.2f}" for loss in losses), accuracy, len(runs)])
    rows.sort(key=lambda row: (row[1] != "no", row[0]))
    columns = ["initialisation", "batch norm", "loss after 1", "3", "10 epochs", "top-1 % then", "seeds"]
    return markdown(columns, rows) + source("cifar10/init/", runs[0]["environment"])


def _runs(part: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records of a part of the CIFAR-10 experiment, by network and variant."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / "cifar10" / part).glob("*/record.json")):
        run = json.loads(path.read_text())
        variant = path.parent.name.removeprefix(run["model"]["name"]).rpartition("seed")[0].strip("-")
        found.setdefault((run["model"]["name"], variant), []).append(run)
    return found


def _mean_and_spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"
