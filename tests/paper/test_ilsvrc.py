"""The full runs, exercised on a miniature of their data: layouts, damage, several processes, death and return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowrank_cnn.data import StreamedSplit, open_data
from lowrank_cnn.paper.reproduce import EXPERIMENTS, reproduce
from lowrank_cnn.train import get_recipe, load_record

SMALL = {
    "width": 0.03, "epochs": 3, "batch_size": 8, "resize": 36, "crop": 32, "dropout": 0, "holdout": 10,
}  # fmt: skip
SETTINGS = [argument for field, value in SMALL.items() for argument in ("--set", f"{field}={value}")]
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LR, GOOGLENET = "vgg11-gmp-lr", "googlenet-lr"
NEVER = -1

many = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")


def alone(source: Path, out: Path, *, experiment: str = "ilsvrc", networks=(LR,), **options):
    options = {"settings": SMALL, "device": "cpu", "progress": False, "say": lambda line: None, **options}
    return reproduce(experiment, open_data(source), out, networks=networks, **options)


def weights(out: Path, network: str = LR) -> dict[str, torch.Tensor]:
    tensors = load_file(max((out / "paper" / f"{network}-seed1").glob("step-*.safetensors")))
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def assert_same_run(one: Path, other: Path, network: str = LR) -> None:
    ours, theirs = weights(one, network), weights(other, network)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    first, second = (load_record(out / "paper" / f"{network}-seed1") for out in (one, other))
    assert first.result["top1"] == second.result["top1"]
    assert first.result["n"] == second.result["n"]
    for a, b in zip(first.history, second.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)


@pytest.mark.parametrize("layout", ["folders", pytest.param("hub", marks=pytest.mark.nightly)])
def test_both_layouts_are_streamed_and_trained_on(layout, request, tmp_path):
    source = request.getfixturevalue(layout)
    data = open_data(source)
    assert isinstance(data.train, StreamedSplit)
    assert (len(data.train), len(data.test), len(data.classes)) == (60, 21, 3)
    networks = [LR, GOOGLENET][: 1 if layout == "folders" else 2]
    table = alone(source, tmp_path / "out", networks=networks)
    assert [row.network for row in table.rows] == networks
    assert table.rows[0].published == 0.67608
    record = load_record(tmp_path / "out" / "paper" / f"{LR}-seed1")
    assert (record.watched, record.result["n"], record.data["name"]) == ("holdout", 21, layout)
    if GOOGLENET in networks:
        assert load_record(tmp_path / "out" / "paper" / f"{GOOGLENET}-seed1").recipe["schedule"] == "poly"


def test_places_has_its_own_table_and_stride(folders, tmp_path):
    table = alone(folders, tmp_path / "out", experiment="places", settings={**SMALL, "epochs": 1})
    assert table.rows[0].published == 0.52
    assert load_record(tmp_path / "out" / "paper" / f"{LR}-seed1").model["stride"] == 2


def test_the_full_runs_follow_the_papers_recipe():
    """Batch, schedule, crops; one centre crop of 224 of a shorter side of 256 in evaluation."""
    (part,) = EXPERIMENTS["ilsvrc"].values()
    assert len(part.networks) == 11
    vgg, googlenet = get_recipe(part.recipe), get_recipe(str(part.own["googlenet"]["recipe"]))
    for recipe in (vgg, googlenet):
        assert (recipe.resize, recipe.crop, recipe.mirror, recipe.pad, recipe.cutout) == (256, 224, True, 0, 0)
        assert (recipe.norm, recipe.label_smoothing, recipe.ema, recipe.momentum) == (None, 0, 0, 0.9)
    assert (vgg.batch_size, vgg.lr, vgg.weight_decay, vgg.schedule) == (256, 0.01, 5e-4, "paper")
    assert (vgg.levels, vgg.drop_factor, vgg.holdout) == (3, 10, 0.02)
    assert (googlenet.batch_size, googlenet.lr, googlenet.weight_decay) == (32, 0.01, 2e-4)
    assert (googlenet.schedule, googlenet.power, googlenet.aux_weight) == ("poly", 0.5, 0.3)


def test_a_corrupt_image_and_an_empty_class_are_counted(folders, tmp_path):
    broken = folders / "train" / "n01440764" / "0.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    (folders / "val" / "n01440764" / "1002.JPEG").write_bytes(b"")
    (folders / "train" / "n09999999").mkdir()
    table = alone(folders, tmp_path / "out")
    record = load_record(tmp_path / "out" / "paper" / f"{LR}-seed1")
    assert record.data["problems"] == {
        "train": {"empty class folder": 1, "undecodable image": 1},
        "test": {"empty class folder": 1, "undecodable image": 1},
    }
    assert (len(record.data["classes"]), record.result["n"]) == (4, 20)
    assert 0 <= table.rows[0].mean <= 1


@many
@pytest.mark.nightly
def test_two_processes_train_the_miniature_to_the_result_of_one(folders, program, tmp_path):
    for broken in ("train/n01440764/0.JPEG", "train/n01443537/31.JPEG"):
        (folders / broken).write_bytes(b"")
    networks = ("--network", LR, "--network", GOOGLENET)
    command = ("reproduce", "ilsvrc", "--data", folders, *networks, "--device", "cpu")
    process = program(NEVER, *command, "--out", tmp_path / "two", "--json", *SETTINGS, launcher=TWO)
    said, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    assert [row["network"] for row in json.loads(said)["rows"]] == [LR, GOOGLENET]
    assert (tmp_path / "two" / "report.html").exists()
    alone(folders, tmp_path / "one", networks=(LR, GOOGLENET))
    for network in (LR, GOOGLENET):
        record = load_record(tmp_path / "two" / "paper" / f"{network}-seed1")
        assert record.processes == 2
        assert record.data["problems"]["train"] == {"undecodable image": 2}  # whichever process met them
        assert_same_run(tmp_path / "one", tmp_path / "two", network)


@many
@pytest.mark.nightly
def test_a_process_that_died_is_started_again_and_all_go_on(hub, program, tmp_path):
    """On shards of which one holds an image that cannot be decoded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    damaged = hub / "data" / "train-00001-of-00004.parquet"
    table = pq.read_table(damaged)
    rows = table.to_pylist()
    rows[4]["image"]["bytes"] = rows[4]["image"]["bytes"][:100]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), damaged, row_group_size=4)
    command = ("reproduce", "ilsvrc", "--data", hub, "--network", LR, "--device", "cpu")
    arguments = (*command, "--out", tmp_path / "two", *SETTINGS)
    process = program(11, *arguments, launcher=TWO)
    process.communicate(timeout=600)
    assert process.returncode != 0
    run = tmp_path / "two" / "paper" / f"{LR}-seed1"
    assert load_record(run).status in ("running", "failed")  # as the first process is killed, or hears of it
    assert max(run.glob("step-*.json")).stem == "step-00000010"
    process = program(NEVER, *arguments, launcher=TWO)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    alone(hub, tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")
