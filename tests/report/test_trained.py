from dataclasses import replace
from pathlib import Path

import pytest

from lowrank_cnn.report.files import read_records
from lowrank_cnn.report.records import Run
from lowrank_cnn.report.trained import RECIPES, trained
from lowrank_cnn.train.recipes import RECIPES as KNOWN

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEY = ("nin-cifar10", "nin-c3-lr", "top1")


@pytest.fixture(scope="module")
def run() -> Run:
    (found,) = read_records([RESULTS / "cifar10" / "paper" / "nin-c3-lr-seed1"]).runs
    return found


def test_the_committed_runs_of_the_papers_recipe_are_taken_and_no_others():
    found = trained(read_records([RESULTS]).runs)
    assert {network for table, network, measure in found if (table, measure) == ("nin-cifar10", "top1")} == {
        "nin",
        "nin-c3",
        "nin-c3-lr",
    }
    assert {table for table, _, _ in found} == {"nin-cifar10"}  # Tiny-ImageNet is not ILSVRC
    assert all(len(runs) == 3 for runs in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "nin-modern"},
        {"data": "digits"},
        {"status": "running"},
        {"settings": (("epochs", "10"),)},
        {"settings": ()},
        {"top1": None},
    ],
)
def test_a_run_in_another_way_tells_nothing(run: Run, change: dict):
    assert trained([run]) == {KEY: (run.top1,), (*KEY[:2], "top5"): (run.top5,)}
    assert KEY not in trained([replace(run, **change)])


@pytest.mark.parametrize("change", [{"width": 0.5}, {"scheme": "lr"}, {"stride": 2}, {"name": "nin-c3"}])
def test_another_network_tells_nothing_of_this(run: Run, change: dict):
    assert KEY not in trained([replace(run, built=replace(run.built, **change))])


def test_every_recipe_named_is_known():
    assert set(RECIPES.values()) <= set(KNOWN)
