"""Experiments and their tables: what is trained, what is left alone, and what the table says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.models import list_models
from lowrank_cnn.paper import reproduce as module
from lowrank_cnn.paper.reproduce import EXPERIMENTS, ExperimentPart, build_table, lines, macs, prepare, reproduce
from lowrank_cnn.train import NotFiniteError, load_record
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.run_folder import Record
from tests.support import locked_elsewhere

SMALL = {"width": 0.0625, "epochs": 2, "crop": 28, "pad": 0, "mirror": False, "batch_size": 32}
ONE = {"parts": ("plain",), "networks": ("nin",), "seeds": 1}


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", limit=64)


@pytest.fixture(scope="module", autouse=True)
def miniature():
    """An experiment of the same make as the real ones, on digits."""
    own = {"googlenet": {"recipe": "googlenet-paper", "stride": 1, "width": 0.03}}
    inits = {init: {**SMALL, "init": init} for init in ("composite", "torch")}
    parts = {
        "plain": ExperimentPart(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=2),
        "watched": ExperimentPart(("nin-c3-lr",), "nin-paper", {"": SMALL | {"holdout": 0.25}}, seeds=1),
        "own": ExperimentPart(
            ("nin", "googlenet"), "modern", {"": SMALL}, 1, own=own, tables=("nin-cifar10",), note="a note"
        ),
        "equal": ExperimentPart(("nin", "nin-c3-lr"), "modern", {"": SMALL}, seeds=1, as_costly_as="nin"),
        "inits": ExperimentPart(("nin-c3-lr",), "modern", inits, seeds=1),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPERIMENTS, "miniature", parts)
        yield


def run(digits, out, **options):
    said: list[str] = []
    table = reproduce("miniature", digits, out, say=said.append, device="cpu", progress=False, **options)
    return list(table.rows), said


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory) -> Path:
    """The folder of all runs of the plain part."""
    out = tmp_path_factory.mktemp("finished")
    run(digits, out, parts=("plain",))
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(finished, tmp_path / "out")


def records_in(out: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.rglob("record.json")}


def test_a_table_has_a_line_per_network_with_its_seeds(finished):
    table = json.loads((finished / "table.json").read_text())
    rows = build_table("miniature", finished, parts=("plain",)).rows
    assert [(row.network, len(row.top1)) for row in rows] == [("nin", 2), ("nin-c3-lr", 2)]
    assert rows[0].published == 0.9188
    assert rows[0].spread is not None
    assert [row["n"] for row in table["rows"]] == [2, 2]
    made_with = json.loads(next(finished.rglob("record.json")).read_text())["environment"]
    assert [known["commit"] for known in table["environments"]] == [made_with["commit"]]
    assert table["environment"] == table["environments"][0]


def test_a_finished_run_has_a_network_to_share_and_fine_tune(finished, digits):
    directory = finished / "plain" / "nin-c3-lr-seed1"
    network = lr.from_pretrained(directory / "network")
    result = load_record(directory).result
    assert lr.evaluate(network, digits, device="cpu", progress=False).top1 == pytest.approx(result["top1"])
    assert f"value: {result['top1']}" in (directory / "network" / "README.md").read_text()


@pytest.mark.parametrize("kept", ["everything", "the record alone"])
def test_finished_runs_are_not_repeated(out, digits, kept):
    before, marks = build_table("miniature", out, parts=("plain",)).rows, records_in(out)
    for path in [path for path in out.rglob("*") if path.is_file()] if kept != "everything" else ():
        if path.name != "record.json":
            path.unlink()
    again, _ = run(digits, out, parts=("plain",))
    assert tuple(again) == before
    assert records_in(out) == marks


def test_the_test_set_is_met_once_at_the_end(finished, digits, tmp_path):
    run(digits, tmp_path, parts=("watched",))
    plain, watched = load_record(finished / "plain/nin-seed1"), load_record(tmp_path / "watched/nin-c3-lr-seed1")
    assert plain.watched == "test"
    assert [epoch["accuracy"] is not None for epoch in plain.history] == [False, True]
    assert watched.watched == "holdout"
    assert all(epoch["accuracy"] is not None for epoch in watched.history)


def test_equal_compute_gives_the_cheaper_network_more_epochs(digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("equal",))
    assert rows[0].epochs == 2
    assert rows[1].epochs > 2
    assert rows[1].epochs * rows[1].macs == pytest.approx(2 * rows[0].macs, rel=0.3)


def test_variants_and_text_settings_reach_the_network(digits, tmp_path):
    text = {"width": "0.05", "norm": "none", "epochs": "1"}
    options = {"parts": ("inits",), "settings": text}
    rows, _ = run(digits, tmp_path, **options)
    assert [row.variant for row in rows] == ["composite", "torch"]
    model = load_record(tmp_path / "inits" / "nin-c3-lr-torch-seed1").model
    assert (model["init"], model["width"], model["norm"]) == ("torch", 0.05, None)
    assert run(digits, tmp_path, **options)[0] == rows


def test_a_network_may_have_its_own_recipe_and_options(digits, tmp_path):
    rows, _ = run(digits, tmp_path, parts=("own",), settings={"epochs": "1", "pool": "none"})
    record = load_record(tmp_path / "own" / "googlenet-seed1")
    assert (record.recipe["name"], record.recipe["epochs"]) == ("googlenet-paper", 1)
    assert (record.model["stride"], record.model["width"], record.model["image_size"]) == (1, 0.0625, 28)
    assert [row.published for row in rows] == [0.9188, None]
    assert build_table("miniature", tmp_path).notes == {"own": "a note"}


def test_what_a_recipe_wants_of_its_network_is_built(digits, tmp_path):
    run(digits, tmp_path, **ONE, settings={"pool": "average"})
    assert load_record(tmp_path / "plain" / "nin-seed1").model["pool"] == "average"


class Small:
    """A hundred classes of 64x64 photographs that nobody looks at."""

    name, classes = "photographs", tuple(map(str, range(100)))

    class test:  # noqa: N801
        channels, size = 3, (3, 64, 64)


def test_every_line_of_every_experiment_can_be_prepared():
    for name, parts in EXPERIMENTS.items():
        for line in lines(name):
            part = parts[line.part]
            assert set(part.own) <= set(part.networks) <= set(list_models())
            recipe, options = prepare(line, part, {}, Small())  # type: ignore[arg-type]
            own = part.own.get(line.network, {})
            assert recipe.dropout == own.get("dropout", recipe.dropout)
            assert recipe.name == own.get("recipe", part.recipe)
            if name == "tiny-imagenet":  # the networks of both tables at a quarter of their size
                assert image_size(Small.test, augmentation(recipe)) == (3, 56, 56)  # type: ignore[arg-type]
                assert macs(line.network, recipe, options, Small()) < 520e6  # type: ignore[arg-type]
                assert options.get("stride") == (1 if line.network in module.GOOGLENET else None)
    assert len(lines("tiny-imagenet")) == 11
    assert [line.network for line in lines("places")] == list(module.PLACES)
    line = module.ExperimentLine("init", "nin", "torch, no norm")
    assert line.directory(Path("out"), 3) == Path("out/init/nin-torch-no-norm-seed3")


@pytest.mark.parametrize(
    ("experiment", "options", "says"),
    [
        ("cifar", {}, "there is no experiment 'cifar'; did you mean cifar10"),
        ("cifar10", {"parts": ("modem",)}, "cifar10 has no part 'modem'; did you mean modern"),
        ("cifar10", {"networks": ("vgg11",)}, "cifar10 has no network 'vgg11'"),
        ("cifar10", {"settings": {"width": "wide"}}, "width wants a value of type float, not 'wide'"),
        ("cifar10", {"settings": {"widht": "1"}}, "a recipe has no field 'widht'"),
        ("cifar10", {"data": Small()}, "cifar10 has 10 classes; photographs has 100"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_in_a_sentence(experiment, options, says, digits, tmp_path):
    with pytest.raises(LowRankError, match=says):
        reproduce(experiment, options.pop("data", digits), tmp_path, **options)


def test_shares_of_the_work_make_one_table(out):
    """As two processes do that name different networks, the table of each showing what the other finished."""
    shutil.rmtree(out / "plain" / "nin-seed2")
    shutil.rmtree(out / "plain" / "nin-c3-lr-seed2")
    table = build_table("miniature", out, parts=("plain",))
    assert [row.network for row in table.rows] == ["nin", "nin-c3-lr"]
    assert table.missing == {"plain/nin-seed2": "not begun", "plain/nin-c3-lr-seed2": "not begun"}
    written = json.loads(table.save(out).read_text())
    assert written["rows"] == json.loads(json.dumps([row.to_dict() for row in table.rows]))
    shutil.rmtree(out / "plain" / "nin-seed1")
    assert not build_table("miniature", out, networks=("nin",)).rows  # none of a longer name


def test_a_run_under_way_is_missing_and_said(out):
    path = out / "plain" / "nin-seed1" / "record.json"
    replace(load_record(path), status="running").save(path)
    table = build_table("miniature", out, **ONE)
    assert [len(row.top1) for row in table.rows] == [1]  # the other seed
    assert table.missing == {"plain/nin-seed1": "running, 2 of 2 epochs"}


def test_runs_of_two_recipes_are_neither_averaged_nor_continued(out, digits):
    path = out / "plain" / "nin-seed2" / "record.json"
    record = load_record(path)
    replace(record, recipe={**record.recipe, "lr": 7.0}).save(path)
    with pytest.raises(LowRankError, match=r"nin-seed1 and .*nin-seed2 differ in the recipe's lr"):
        build_table("miniature", out)
    replace(record, model={**record.model, "width": 7.0}).save(path)
    with pytest.raises(LowRankError, match=r"nin-seed2 differ in the network's options"):
        build_table("miniature", out)
    shutil.rmtree(path.parent)
    run(digits, out, **ONE, settings={"evaluate_every": 2})  # teaches nothing
    with pytest.raises(LowRankError, match=r"nin-seed1 was trained with lr=0\.1, not lr=0\.5"):
        run(digits, out, **ONE, settings={"lr": 0.5})


def test_seeds_of_older_records_are_averaged_with_new_ones(out):
    path = out / "plain" / "nin-seed1" / "record.json"
    record = json.loads(path.read_text())
    del record["model"]["pool"], record["recipe"]["pool"], record["sha256"]
    path.write_text(json.dumps(record | {"recipe": record["recipe"] | {"evaluate_every": 1000}}))
    assert [len(row.top1) for row in build_table("miniature", out).rows] == [2, 2]


def test_a_run_that_diverges_is_said_and_the_others_go_on(digits, tmp_path, monkeypatch):
    fit = module.fit

    def diverge(network, *arguments, **options):
        if options["out"].name == "nin-seed1":
            raise NotFiniteError("the loss is not finite")
        return fit(network, *arguments, **options)

    monkeypatch.setattr(module, "fit", diverge)
    rows, said = run(digits, tmp_path, parts=("plain",), networks=("nin",))
    assert [(row.network, len(row.top1)) for row in rows] == [("nin", 1)]
    assert said.count("  failed: the loss is not finite") == 1


def test_runs_that_another_process_holds_are_left_to_it(out, digits):
    held = out / "plain" / "nin-seed1"
    shutil.rmtree(held)
    with locked_elsewhere(held):
        run(digits, out, **ONE)
    assert not (held / "record.json").exists()
    run(digits, out, **ONE)
    assert (held / "record.json").exists()


def test_networks_are_compared_with_the_papers_claims(tmp_path):
    for network, base in (("nin", 0.90), ("nin-c3-lr", 0.91)):
        (line,) = lines("cifar10", ("paper",), (network,))
        for seed in (1, 2, 3):
            record = Record({"name": network}, {"name": "nin-paper", "epochs": 3}, {}, seed, "test", "fp32", "cpu")
            record.history = [{"epoch": 1, "train_accuracy": 0.95}]
            costs = {"macs": 100, "params": 10, "epochs": 3, "seconds": 60.0}
            record.result, record.status = {"top1": base + 0.001 * seed, "top5": 0.99, **costs}, "finished"
            record.save(line.directory(tmp_path, seed) / "record.json")
    table = build_table("cifar10", tmp_path, parts=("paper",))
    assert table.rows[0].overfit == pytest.approx((0.049, 0.048, 0.047))
    (comparison,) = (found for found in table.comparisons() if found.measure == "top1")
    (gap,) = comparison.gaps
    assert (gap.question, gap.verdict, gap.ours) == ("nin-c3-lr matches nin", "holds", pytest.approx(1.0))
    told = next(one for one in table.to_dict()["comparisons"] if one["measure"] == "top1")
    assert (told["gaps"][0]["question"], told["order"]["pairs"]) == ("nin-c3-lr matches nin", 1)
