from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.paper.experiments import lines
from lowrank_cnn.paper.reproduce import NOT_BEGUN, build_table
from lowrank_cnn.train.run_folder import Record

Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write the record of a run of `nin` or `nin-c3-lr` on CIFAR-10, without any training."""

    def write(network: str, seed: int, top1: float, *, status: str = "finished", lr: float = 0.1) -> None:
        (line,) = lines("cifar10", ("paper",), (network,))
        result = {"top1": top1, "top5": 0.99, "macs": 100, "params": 10, "epochs": 3, "seconds": 60.0}
        record = Record(
            {"name": network}, {"name": "nin-paper", "lr": lr, "epochs": 3}, {}, seed, "test", "fp32", "cpu"
        )
        record.history = [{"epoch": 1, "train_accuracy": 0.95}]
        record.result, record.status = (result if status == "finished" else {}), status
        directory = line.directory(tmp_path, seed)
        directory.mkdir(parents=True)
        record.save(directory / "record.json")

    return write


def test_a_row_is_the_mean_over_the_finished_seeds(put: Put, tmp_path: Path):
    for seed, top1 in ((1, 0.90), (2, 0.92)):
        put("nin", seed, top1)
    put("nin", 3, 0.1, status="running")
    table = build_table("cifar10", tmp_path, parts=("paper",))
    (row,) = table.rows
    assert (row.network, row.top1, row.published) == ("nin", (0.90, 0.92), 0.9188)
    assert row.mean == pytest.approx(0.91)
    assert row.overfit == pytest.approx((0.05, 0.03))
    assert table.missing["paper/nin-seed3"] == "running, 1 of 3 epochs"
    assert table.missing["paper/nin-c3-seed1"] == NOT_BEGUN


def test_networks_are_compared_with_the_papers_claims(put: Put, tmp_path: Path):
    for network, base in (("nin", 0.90), ("nin-c3-lr", 0.91)):
        for seed in (1, 2, 3):
            put(network, seed, base + 0.001 * seed)
    table = build_table("cifar10", tmp_path, parts=("paper",))
    (comparison,) = (found for found in table.comparisons() if found.measure == "top1")
    (gap,) = comparison.gaps
    assert (gap["question"], gap["verdict"]) == ("nin-c3-lr matches nin", "holds")
    assert gap["ours"] == pytest.approx(1.0)
    assert table.save(tmp_path).read_text().startswith("{")


def test_runs_of_different_recipes_are_not_averaged(put: Put, tmp_path: Path):
    put("nin", 1, 0.9)
    put("nin", 2, 0.9, lr=0.2)
    with pytest.raises(LowRankError, match="differ in the recipe's lr"):
        build_table("cifar10", tmp_path, parts=("paper",))
