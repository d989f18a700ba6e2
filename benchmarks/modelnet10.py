"""ModelNet10 voxels: strips and (2+1)-D filters against thin dense networks of the same measured time.

    python -m benchmarks.modelnet10 --data modelnet10.npz [--processes 4] [--budget 280]

All networks are timed through `optimize`. Thin dense ones, in 32s of filters, are added nearer and nearer to the
time of each design. The rival is the largest that takes no longer than the first one of that time. Designs and
rivals are tuned alike at three rates on held-out shapes, and trained with 8 seeds; `volumes` of questions.json is
the question. Runs are kept in `--runs`, from where the same command goes on. The record is written at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

import lowrank_cnn as lr
from benchmarks.common import RESULTS, run_command, training_parser, write_record
from benchmarks.run_book import answer_table, kept_answers, paired_answers
from lowrank_cnn.choose.frontier import DesignRow, Frontier
from lowrank_cnn.choose.trace import FrontierPlan, trace_frontier, width_of_time
from lowrank_cnn.choose.verdict import read_questions
from lowrank_cnn.data import open_data
from lowrank_cnn.train.recipe import parse_settings

NETWORK = "benchmarks/modelnet10.py:voxels"
LAYERS = ((64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1))
"""Filters and stride of each 3x3x3 conv."""
SETTINGS = {"epochs": 20, "batch_size": 128, "warmup": 2.0, "ema": 0.0}
THIN, ROUNDS = "dense-32s", 4
"""The thin dense networks; each round adds one nearer to the time of each design."""


def voxels(num_classes: int = 10) -> nn.Module:
    """The dense network, from volumes of 30x30x30 down to 4x4x4."""
    layers, channels = [], 1
    for width, stride in LAYERS:
        layers += [
            nn.Conv3d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return lr.init_(
        nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    )


def ratio(row: DesignRow) -> float:
    assert row.timing is not None
    return row.timing.ratio


def thin_of_time(found: Frontier, design: DesignRow) -> str:
    """The thin dense network that should take as long as a design, by those that were timed."""
    timed = {row.design.width: ratio(row) for row in found.rows if row.name.startswith(f"{THIN}@")}
    return f"{THIN}@{min(1.0, width_of_time({1.0: 1.0, **timed}, ratio(design))):g}"


def rival(found: Frontier, design: DesignRow, tolerance: float) -> DesignRow:
    """The largest dense network that takes no longer than the first one of the design's time."""
    dense = [row for row in found.rows if row.dense]
    times = [ratio(row) for row in dense if ratio(row) >= (1 - tolerance) * ratio(design)]
    longest = min(times, default=max(map(ratio, dense)))
    return max((row for row in dense if ratio(row) <= longest), key=lambda row: row.macs)


def main() -> None:
    made = training_parser(__doc__, "modelnet10.json", network=NETWORK, recipe="modern", seeds=8)
    made.add_argument("--runs", type=Path, default=RESULTS / "modelnet10", help="folder of the runs")
    made.add_argument("--batch", type=int, default=256, help="volumes that are timed together")
    options, began = made.parse_args(), time.monotonic()
    asked, data = read_questions()["volumes"], open_data(options.data, limit=options.limit)
    settings = {**SETTINGS, **parse_settings(options.settings)}

    def traced(names: Iterable[str], **plan: Any) -> Frontier:
        how = {"batch": options.batch, "processes": options.processes, "match": ()}
        left = options.budget - (time.monotonic() - began)
        whole = FrontierPlan(tuple(dict.fromkeys(names)), **{"seeds": 0, "budget": max(0.0, left), **how, **plan})
        into: dict[str, Any] = {"recipe": options.recipe, "settings": settings, "device": options.device}
        found = trace_frontier(options.network, data, options.runs, whole, **into)
        if time.monotonic() - began > options.budget:
            sys.exit("The time is over: the same command continues from here.")
        return found

    found = traced(asked["designs"])
    designs = [row for row in found.rows if row.name in asked["designs"]]
    for _ in range(ROUNDS):
        found = traced(thin_of_time(found, row) for row in designs)
    pairs = [(row.name, rival(found, row, asked["tolerance"]).name) for row in designs]
    tuning = {"rates": tuple(asked["tuning"]["rates"]), "tries": asked["tuning"]["tries"]}
    found = traced((name for pair in pairs for name in pair), seeds=options.seeds, **tuning)
    rows = [row for row in found.rows if row.runs]
    runs = {row.name: [kept_answers(right) for right in found.right_answers(row)] for row in rows}
    answers = paired_answers(pairs, runs, margin=asked["margin"], alpha=asked["alpha"], least_runs=asked["seeds"])
    networks = [
        {
            "network": row.name,
            "macs": row.macs,
            "params": row.params,
            "ms": found.ms(row),
            "form": row.timing and row.timing.choice,
            "top1": found.top1(row),
            "rate": row.rate,
            "tries": {str(one.rate): one.accuracies for one in row.tries},
            "runs": [{"seed": run.seed, **kept} for run, kept in zip(row.runs, runs[row.name], strict=True)],
        }
        for row in rows
    ]
    about = {"network": options.network, "settings": settings, "batch": options.batch}
    write_record(options.out, "modelnet10", **about, networks=networks, answers=answers)
    print(answer_table(answers))


if __name__ == "__main__":
    run_command(main)
