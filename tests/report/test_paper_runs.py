from dataclasses import replace
from pathlib import Path

import pytest

from lowrank_cnn.paper.published import rows
from lowrank_cnn.report.reading import read_record, read_records
from lowrank_cnn.report.records import Run
from lowrank_cnn.report.results import RECIPES, accuracies
from lowrank_cnn.train.recipes import get_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEY = ("nin-cifar10", "nin-c3-lr", "top1")
IMAGES = {"ilsvrc12": ("ILSVRC/imagenet-1k", 1_281_167, 50_000), "places205": ("places205", 2_448_873, 20_500)}
IMAGES["cifar10"] = ("cifar10", 50_000, 10_000)


@pytest.fixture(scope="module")
def run() -> Run:
    (found,) = read_records([RESULTS / "cifar10" / "paper" / "nin-c3-lr-seed1"]).runs
    return found


def record(network: str, recipe: str, images: tuple[str, int, int], **model: object) -> dict:
    name, train, test = images
    return {
        "kind": "training",
        "status": "finished",
        "model": {"name": network, **model},
        "recipe": get_recipe(recipe).to_dict(),
        "data": {"name": name, "train": train, "test": test},
        "result": {"top1": 0.5, "top5": 0.7},
    }


def test_the_committed_runs_of_the_papers_recipe_are_taken_and_no_others():
    found = accuracies(read_records([RESULTS]).runs)
    top1 = {network for table, network, measure in found if (table, measure) == ("nin-cifar10", "top1")}
    assert top1 == {"nin", "nin-c3", "nin-c3-lr"}
    assert {table for table, _, _ in found} == {"nin-cifar10"}  # Tiny-ImageNet is not ILSVRC
    assert all(len(runs) == 3 for runs in found.values())


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.table in RECIPES], ids=lambda row: f"{row.table}-{row.network}"
)
def test_every_row_of_every_table_is_found(row):
    own = {"stride": row.stride} if row.table == "vgg-places" else {}
    values = record(row.network, RECIPES[row.table], IMAGES[row.dataset], **own)
    found = accuracies(read_record(values, Path("record.json")))
    assert found[row.table, row.network, "top1"] == (0.5,)
    assert {table for table, _, _ in found} == {row.table}


@pytest.mark.parametrize(
    "setting",
    [
        ("epochs", "179"),
        ("epochs", "None"),
        ("epochs", "many"),
        ("epochs", "nan"),
        ("lr", "0.01"),
        ("preprocess", "standardize"),
        ("weight_decay", "0.5"),
        ("norm", "batch"),
        ("pool", "average"),
        ("init", "torch"),
        ("holdout", "0.1"),
        ("begun_from", "weights.safetensors"),
        ("clip_norm", "0.0"),
    ],
)
def test_a_run_by_other_settings_tells_nothing(run: Run, setting: tuple[str, str]):
    settings = tuple({**dict(run.settings), setting[0]: setting[1]}.items())
    assert accuracies([run])[KEY] == (run.top1,)
    assert KEY not in accuracies([replace(run, settings=settings)])


@pytest.mark.parametrize(("name", "value"), [("epochs", "300"), ("dropout", "0.4"), ("precision", "fp32")])
def test_what_a_network_or_machine_has_for_itself_may_differ(run: Run, name: str, value: str):
    settings = tuple({**dict(run.settings), name: value}.items())
    assert KEY in accuracies([replace(run, settings=settings)])


@pytest.mark.parametrize(
    "change",
    [{"recipe": "nin-modern"}, {"data": "digits"}, {"status": "running"}, {"settings": ()}, {"top1": None}],
)
def test_a_run_in_another_way_tells_nothing(run: Run, change: dict):
    assert KEY not in accuracies([replace(run, **change)])


@pytest.mark.parametrize(
    "change", [{"width": 0.5}, {"scheme": "lr"}, {"stride": 2}, {"name": "nin-c3"}, {"base": "nin-c3-lr"}]
)
def test_another_network_tells_nothing_of_this(run: Run, change: dict):
    assert KEY not in accuracies([replace(run, network=replace(run.network, **change))])


def test_a_part_of_the_images_tells_nothing():
    values = record("nin-c3-lr", "nin-paper", ("cifar10", 5000, 10_000))
    assert accuracies(read_record(values, Path("record.json"))) == {}
