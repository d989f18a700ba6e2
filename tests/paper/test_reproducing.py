import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.paper import experiments
from lowrank_cnn.paper import reproduce as module
from lowrank_cnn.paper.experiments import ExperimentPart, lines
from lowrank_cnn.paper.reproduce import build_table, reproduce
from lowrank_cnn.train import NotFiniteError, load_record

SMALL = {"width": 0.0625, "epochs": 2, "crop": 28, "pad": 0, "mirror": False, "batch_size": 32}


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", limit=64)


@pytest.fixture
def miniature(monkeypatch):
    """An experiment of the same make as the real ones, on digits."""
    parts = {
        "plain": ExperimentPart(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=2),
        "watched": ExperimentPart(("nin-c3-lr",), "nin-paper", {"": SMALL | {"holdout": 0.25}}, seeds=1),
        "own": ExperimentPart(
            ("nin", "googlenet"),
            "modern",
            {"": SMALL},
            seeds=1,
            own={"googlenet": {"recipe": "googlenet-paper", "stride": 1, "width": 0.03}},
            tables=("nin-cifar10",),
            note="a note",
        ),
        "equal": ExperimentPart(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=1, as_costly_as="nin"),
        "inits": ExperimentPart(
            ("nin-c3-lr",), "modern", {i: {**SMALL, "init": i} for i in ("composite", "torch")}, seeds=1
        ),
    }
    monkeypatch.setitem(experiments.EXPERIMENTS, "miniature", parts)


def run(digits, out, **options):
    said: list[str] = []
    table = reproduce("miniature", digits, out, say=said.append, device="cpu", progress=False, **options)
    return list(table.rows), said


def test_a_table_has_a_line_per_network_with_its_seeds(miniature, digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("plain",))
    assert [row.network for row in rows] == ["nin", "nin-c3-lr"]
    assert all(len(row.top1) == 2 for row in rows)
    assert rows[0].published == 0.9188
    assert rows[0].spread is not None
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"][1]["n"] == 2
    made_with = json.loads(next(tmp_path.rglob("record.json")).read_text())["environment"]
    assert [known["commit"] for known in table["environments"]] == [made_with["commit"]]
    assert table["environment"] == table["environments"][0]


def test_a_finished_run_has_a_network_to_share_and_fine_tune(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin-c3-lr",), seeds=1)
    [directory] = (path.parent for path in tmp_path.rglob("record.json"))
    network = lr.from_pretrained(directory / "network")
    result = load_record(directory).result
    assert lr.evaluate(network, digits, device="cpu", progress=False).top1 == pytest.approx(result["top1"])
    assert f"{100 * result['top1']:.2f}" in (directory / "network" / "README.md").read_text()


def test_finished_runs_are_not_repeated(miniature, digits, tmp_path, monkeypatch):
    first, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    second, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    assert first == second
    assert marks == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}


def test_a_record_alone_is_a_finished_run(miniature, digits, tmp_path):
    first, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    records = {path: path.read_bytes() for path in tmp_path.rglob("record.json")}
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "record.json"]:
        path.unlink()
    again, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    assert again == first
    assert records == {path: path.read_bytes() for path in tmp_path.rglob("record.json")}


def test_the_test_set_is_met_once_at_the_end(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("watched", "plain"), networks=("nin-c3-lr",))
    plain, watched = (load_record(tmp_path / part / "nin-c3-lr-seed1") for part in ("plain", "watched"))
    assert plain.watched == "test"
    assert [epoch["accuracy"] is not None for epoch in plain.history] == [False, True]
    assert watched.watched == "holdout"
    assert all(epoch["accuracy"] is not None for epoch in watched.history)


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


def test_every_line_of_every_experiment_can_be_prepared():
    bench = module.ExperimentBench(Small(), Path(), True, print, {})  # type: ignore[arg-type]
    for name, parts in experiments.EXPERIMENTS.items():
        for line in lines(name):
            task = bench.prepared(line, parts[line.part], {})
            own = parts[line.part].own.get(line.network, {})
            assert task.recipe.dropout == own.get("dropout", task.recipe.dropout)
            assert task.recipe.name == own.get("recipe", parts[line.part].recipe)


def test_other_images_are_refused(tmp_path):
    with pytest.raises(LowRankError, match="cifar10 has 10 classes; photographs has 100"):
        module.reproduce("cifar10", Small(), tmp_path)  # type: ignore[arg-type]


def test_unknown_names_are_refused_in_a_sentence(digits, tmp_path):
    with pytest.raises(LowRankError, match="there is no experiment 'cifar'; did you mean cifar10"):
        module.reproduce("cifar", digits, tmp_path)
    with pytest.raises(LowRankError, match="cifar10 has no part 'modem'; did you mean modern"):
        module.reproduce("cifar10", digits, tmp_path, parts=("modem",))
    with pytest.raises(LowRankError, match="cifar10 has no network 'vgg11'"):
        module.reproduce("cifar10", digits, tmp_path, networks=("vgg11",))
    with pytest.raises(LowRankError, match="width wants a value of type float, not 'wide'"):
        module.reproduce("cifar10", digits, tmp_path, settings={"width": "wide"})
    with pytest.raises(LowRankError, match="a recipe has no field 'widht'"):
        module.reproduce("cifar10", digits, tmp_path, settings={"widht": "1"})


def test_a_network_may_have_its_own_recipe_and_options(miniature, digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("own",), settings={"epochs": "1"})
    record = load_record(tmp_path / "own" / "googlenet-seed1")
    assert (record.recipe["name"], record.recipe["epochs"]) == ("googlenet-paper", 1)
    assert (record.model["stride"], record.model["width"], record.model["image_size"]) == (1, 0.0625, 28)
    assert [row.published for row in rows] == [0.9188, None]
    assert build_table("miniature", tmp_path).notes == {"own": "a note"}


def test_text_settings_reach_the_network(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("inits",), settings={"width": "0.05", "norm": "none", "epochs": "1"})
    record = load_record(tmp_path / "inits" / "nin-c3-lr-torch-seed1")
    assert (record.model["width"], record.model["norm"]) == (0.05, None)


def test_shares_of_the_work_make_one_table(miniature, digits, tmp_path):
    """As two processes do that name different networks, the table of each showing what the other finished."""
    first, _ = run(digits, tmp_path, parts=("plain",), networks=("nin-c3-lr",), seeds=1)
    assert [row.network for row in first] == ["nin-c3-lr"]
    both, _ = run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    assert [row.network for row in both] == ["nin", "nin-c3-lr"]
    table = build_table("miniature", tmp_path, parts=("plain",))
    assert list(table.rows) == both
    assert table.missing == {"plain/nin-seed2": "not begun", "plain/nin-c3-lr-seed2": "not begun"}
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == json.loads(
        json.dumps([row.to_dict() for row in both])
    )


def test_a_run_under_way_is_missing_and_said(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    record = load_record(tmp_path / "plain" / "nin-seed1")
    replace(record, status="running").save(tmp_path / "plain" / "nin-seed1" / "record.json")
    table = build_table("miniature", tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    assert not table.rows
    assert table.missing == {"plain/nin-seed1": "running, 2 of 2 epochs"}


def test_runs_of_two_recipes_are_not_averaged(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin",), settings={"epochs": 1})
    record = load_record(tmp_path / "plain" / "nin-seed2")
    other = replace(record, recipe={**record.recipe, "lr": 7.0})
    other.save(tmp_path / "plain" / "nin-seed2" / "record.json")
    with pytest.raises(LowRankError, match=r"nin-seed1 and .*nin-seed2 differ in the recipe's lr"):
        build_table("miniature", tmp_path)


def test_weights_can_be_left_out(miniature, digits, tmp_path):
    options = {"parts": ("inits",), "settings": {"epochs": 1}, "keep_weights": False}
    rows, _ = run(digits, tmp_path, **options)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert len(list(tmp_path.rglob("record.json"))) == 2
    again, _ = run(digits, tmp_path, **options)
    assert again == rows


def test_a_run_that_diverges_is_said_and_the_others_go_on(miniature, digits, tmp_path, monkeypatch):
    fit = module.fit

    def diverge(network, *arguments, **options):
        if options["out"].name == "nin-seed1":
            raise NotFiniteError("the loss is not finite")
        return fit(network, *arguments, **options)

    monkeypatch.setattr(module, "fit", diverge)
    rows, said = run(digits, tmp_path, parts=("plain",))
    assert [(row.network, len(row.top1)) for row in rows] == [("nin", 1), ("nin-c3-lr", 2)]
    assert said.count("  failed: the loss is not finite") == 1


def test_a_run_by_another_recipe_is_not_taken_for_this_one(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1)
    run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1, settings={"evaluate_every": 2})
    with pytest.raises(LowRankError, match=r"nin-seed1 was trained with lr=0\.1, not lr=0\.5"):
        run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1, settings={"lr": 0.5})


def test_what_a_recipe_wants_of_its_network_is_built(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin",), seeds=1, settings={"pool": "average"})
    assert load_record(tmp_path / "plain" / "nin-seed1").model["pool"] == "average"


def test_seeds_of_older_records_are_averaged_with_new_ones(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin",))
    path = tmp_path / "plain" / "nin-seed1" / "record.json"
    record = json.loads(path.read_text())
    del record["model"]["pool"], record["recipe"]["pool"], record["sha256"]
    path.write_text(json.dumps(record | {"recipe": record["recipe"] | {"evaluate_every": 1000}}))
    assert [len(row.top1) for row in build_table("miniature", tmp_path).rows] == [2]


def test_a_line_takes_no_runs_of_a_longer_name(miniature, digits, tmp_path):
    run(digits, tmp_path, parts=("plain",), networks=("nin-c3-lr",), seeds=1)
    assert not build_table("miniature", tmp_path, networks=("nin",)).rows


def test_tiny_imagenet_has_the_networks_of_both_tables_at_a_quarter_of_their_size(monkeypatch):
    small = module.ExperimentBench(Small(), Path(), True, print, {})  # type: ignore[arg-type]
    for line in lines("tiny-imagenet"):
        part = experiments.EXPERIMENTS["tiny-imagenet"][line.part]
        task = small.prepared(line, part, {})
        assert small.input_size(task.recipe) == (3, 56, 56)
        assert task.recipe.norm is None
        assert small.macs(task) < 520e6
        stride = 1 if line.network in experiments.GOOGLENET else None
        assert task.options.get("stride") == stride


class Small:
    """A hundred classes of 64x64 photographs that nobody looks at."""

    name, classes = "photographs", tuple(map(str, range(100)))

    class test:  # noqa: N801
        channels, size = 3, (3, 64, 64)


def test_runs_that_another_process_holds_are_left_to_it(miniature, digits, tmp_path):
    held = tmp_path / "plain" / "nin-seed1"
    code = "import sys, pathlib, time\nfrom lowrank_cnn.core.files import locked\n"
    code += "with locked(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(held)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    _, said = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    process.kill()
    process.wait()
    assert not any("seed 1" in line for line in said)
    assert not (held / "record.json").exists()
    assert (tmp_path / "plain" / "nin-seed2" / "record.json").exists()
    _, said = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    assert any("seed 1" in line for line in said)
    assert (held / "record.json").exists()
