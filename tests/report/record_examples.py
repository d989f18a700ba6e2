"""The smallest whole records, that tests read and damage, and what a report reads from such values."""

import json
import tempfile
from pathlib import Path

from lowrank_cnn.report import Records, read_records
from lowrank_cnn.report.records import Run
from lowrank_cnn.report.results import NetworkResult, gather

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUN = {
    "kind": "training",
    "model": {"name": "nin-c3-lr", "num_classes": 10, "width": 0.5, "stride": 1},
    "recipe": {"name": "nin-paper", "epochs": 2},
    "data": {"name": "cifar10", "image": [3, 30, 30]},
    "seed": 3,
    "history": [
        {"epoch": 1, "train_loss": 2.0, "accuracy": 0.4},
        {"epoch": 2, "train_loss": 1.5, "accuracy": None},
    ],
    "result": {"top1": 0.9, "top5": 0.99, "macs": 1000, "params": 100, "seconds": 60.0},
    "status": "finished",
}
CONVERTED = {
    **RUN,
    "model": {"name": "Mine+lr", "config": None, "base": "Mine", "conversion": {"changed": []}},
    "result": {"top1": 0.9, "n": 500, "macs": 1000, "params": 100, "dense": {"macs": 2000, "params": 150}},
}
TIMING = {
    "kind": "timing",
    "name": "nin-c3-lr",
    "input": [4, 3, 30, 30],
    "runtime": "torch",
    "device": "cuda:0",
    "macs": 4000,
    "total": {"ms": 8.0, "low": 7.9, "high": 8.2, "runs": 15},
    "layers": [{"name": "a", "macs": 3000, "ms": 5.0}, {"name": "pool", "macs": 0, "ms": 1.0}],
    "twin": {"name": "nin", "input": [4, 3, 30, 30], "device": "cuda:0", "total": {"ms": 16.0}, "macs": 8000},
}


def records_of(*values: object) -> Records:
    """The records that a report reads from files with these values."""
    with tempfile.TemporaryDirectory() as folder:
        for number, value in enumerate(values):
            Path(folder, f"{number:05}.json").write_text(json.dumps(value))
        return read_records([folder])


def run_of(values: dict) -> Run:
    (run,) = records_of(values).runs
    return run


def gathered(*values: dict) -> list[NetworkResult]:
    """One result for each network of these records, none of which is skipped."""
    records = records_of(*values)
    assert records.skipped == []
    return gather(records)
