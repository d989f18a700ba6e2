import json

import pytest

from lowrank_cnn.data import open_data
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.models import list_models
from lowrank_cnn.paper import experiments
from lowrank_cnn.paper import reproduce as module
from lowrank_cnn.paper.experiments import Part
from lowrank_cnn.paper.reproduce import reproduce
from lowrank_cnn.train import get_recipe

SMALL = {"width": 0.0625, "epochs": 2, "crop": 28, "pad": 0, "mirror": False, "batch_size": 32}


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", limit=160)


@pytest.fixture
def miniature(monkeypatch):
    """An experiment of the same make as the real ones, on digits."""
    parts = {
        "plain": Part(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=2),
        "decided": Part(
            ("nin-c3-lr",), "nin-paper", {"": SMALL | {"holdout": 0.25, "patience": 1}}, 1, decide=True
        ),
        "equal": Part(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=1, equal_compute=True),
        "inits": Part(
            ("nin-c3-lr",), "modern", {i: {**SMALL, "init": i} for i in ("composite", "torch")}, seeds=1
        ),
    }
    monkeypatch.setitem(experiments.EXPERIMENTS, "miniature", parts)


def run(digits, out, **options):
    said: list[str] = []
    rows = reproduce("miniature", digits, out, say=said.append, device="cpu", progress=False, **options)
    return rows, said


def test_a_table_has_a_line_per_network_with_its_seeds(miniature, digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("plain",))
    assert [row.network for row in rows] == ["nin", "nin-c3-lr"]
    assert all(len(row.top1) == 2 for row in rows)
    assert rows[0].published == 0.9188
    assert rows[0].spread is not None
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][1]["n"] == 2
    assert table["environment"]["torch"]


def test_finished_runs_are_not_repeated(miniature, digits, tmp_path, monkeypatch):
    first, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    second, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    assert first == second
    assert marks == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}


def test_decisions_are_made_on_held_out_images_and_replayed_on_all(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("decided",))
    decision = json.loads((tmp_path / "decided-decide" / "nin-c3-lr-seed0" / "record.json").read_text())
    final = json.loads((tmp_path / "decided" / "nin-c3-lr-seed1" / "record.json").read_text())
    assert (decision["watched"], decision["recipe"]["holdout"]) == ("holdout", 0.25)
    assert final["recipe"]["holdout"] == 0
    assert final["recipe"]["drop_epochs"] == decision["result"]["drop_epochs"]
    assert final["recipe"]["epochs"] == decision["result"]["epochs"]


def test_equal_compute_gives_the_cheaper_network_more_epochs(miniature, digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("equal",))
    assert rows[0].epochs == 2
    assert rows[1].epochs > 2
    assert rows[1].epochs * rows[1].macs == pytest.approx(2 * rows[0].macs, rel=0.3)


def test_a_variant_changes_the_network(miniature, digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("inits",))
    assert [row.variant for row in rows] == ["composite", "torch"]
    record = json.loads((tmp_path / "inits" / "nin-c3-lr-torch-seed1" / "record.json").read_text())
    assert record["model"]["init"] == "torch"


def test_every_experiment_names_a_recipe_and_networks_that_exist():
    for parts in experiments.EXPERIMENTS.values():
        for part in parts.values():
            assert get_recipe(part.recipe).name == part.recipe
            assert set(part.networks) <= set(list_models())


def test_unknown_names_are_refused_in_a_sentence(digits, tmp_path):
    with pytest.raises(LowRankError, match="there is no experiment 'cifar'; did you mean cifar10"):
        module.reproduce("cifar", digits, tmp_path)
    with pytest.raises(LowRankError, match="cifar10 has no part 'modem'; did you mean modern"):
        module.reproduce("cifar10", digits, tmp_path, parts=("modem",))
