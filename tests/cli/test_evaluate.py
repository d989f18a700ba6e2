"""The commands evaluate and predict, as a user types them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import ResidentSplit, open_data
from lowrank_cnn.train import load_record
from lowrank_cnn.train.evaluate import evaluate
from tests.cli.conftest import SMALL_RUN, invoke, open_squares

pytestmark = pytest.mark.usefixtures("squares")
CPU = ("--data", "squares", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The directory of a trained run, with an image in it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowrank_cnn.data.open_data", open_squares)
        done = invoke("train", "nin-c3-lr", "--data", "squares", *SMALL_RUN, "--out", run)
    assert done.exit_code == 0, done.output
    assert "batch_size=16" in done.output
    assert "48 to train on" in done.output
    Image.new("L", (16, 16), 230).save(run / "a.png")
    return run


def test_a_run_and_what_is_exported_from_it_are_evaluated_and_asked(output_of, lowrank, trained, tmp_path):
    file, image = tmp_path / "net.safetensors", trained / "a.png"
    output_of("export", trained, file)
    answers = []
    for source in (trained, file):
        figures = json.loads(output_of("evaluate", source, *CPU, "--json"))
        assert (figures["n"], figures["top1"]) == (10, load_record(trained).result["top1"])
        assert figures["loss"] == load_record(trained).result["loss"]
        answers += json.loads(output_of("predict", source, image, "--device", "cpu", "--json"))
    assert {c["class"] for c in answers[0]["classes"]} == {"dark", "bright"}
    assert answers[0] == answers[1]
    (tmp_path / "damaged.png").write_bytes(b"")
    mixed = lowrank(
        "predict", trained, image, tmp_path / "missing.png", tmp_path / "damaged.png", "--device", "cpu"
    )
    assert mixed.exit_code == 1
    for words in ("there is no such file", "could not be read", "2 of 3 images"):
        assert words in mixed.output


@pytest.mark.parametrize("limit", [(), ("--limit", "24")])
def test_a_flat_folder_is_evaluated_on_the_images_that_training_held_out(lowrank, tmp_path, monkeypatch, limit):
    monkeypatch.setattr("lowrank_cnn.data.open_data", open_data)  # real images, not the squares
    photos, run, shades = tmp_path / "photos", tmp_path / "run", {"dark": 20, "bright": 200}
    for name, shade in shades.items():
        (photos / name).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (16, 16), shade + number).save(photos / name / f"{number}.png")
    for number in range(3):  # left out, of the images to train on or of those to test on
        (photos / "dark" / f"broken{number}.png").write_text("no image")
    done = lowrank("train", "nin-c3-lr", "--data", photos, *SMALL_RUN, *limit, "--out", run)
    assert done.exit_code == 0, done.output
    again = lowrank("evaluate", run, "--data", photos, "--device", "cpu", "--json")
    record = load_record(run)
    n = record.data["test"]
    assert json.loads(again.stdout)["n"] == n < 10
    assert json.loads(again.stdout)["top1"] == record.result["top1"]
    assert f"these are the {n} images held out of it" in again.stderr
    exported = tmp_path / ("net.onnx" if limit else "net.safetensors")
    assert lowrank("export", run, exported).exit_code == 0
    assert json.loads(lowrank("evaluate", exported, "--data", photos, "--json").stdout)["n"] == n
    assert evaluate(run, photos, device="cpu", progress=False).n == n
    Image.new("L", (16, 16), 9).save(photos / "dark" / "new.png")  # now it is another set, used as a whole
    whole = lowrank("evaluate", run, "--data", photos, "--json")
    assert json.loads(whole.stdout)["n"] == 41
    assert "trained on a set called photos, which held other images then" in whole.stderr
    with pytest.warns(UserWarning, match="may have been trained on most of these 41 images"):
        assert evaluate(run, photos, device="cpu", progress=False).n == 41


def test_evaluation_brings_images_to_the_size_of_training(lowrank, output_of, trained, monkeypatch):
    small, asked = open_squares(), []

    def open_(*_, image_size=None, channels=None, **__):
        asked.append((image_size, channels))
        side = int(image_size or 80)
        images = torch.nn.functional.interpolate(small.test.images, (side, side))
        return replace(small, test=ResidentSplit.of(images, torch.arange(10) % 2))

    monkeypatch.setattr("lowrank_cnn.data.open_data", open_)
    figures = json.loads(output_of("evaluate", trained, *CPU, "--json"))
    assert figures["top1"] == load_record(trained).result["top1"]
    assert asked == [(None, None), (16, 1)]
    error = str(lowrank("evaluate", trained, *CPU, "--image-size", "40").exception)
    assert "1x16x16" in error
    assert "--image-size 16" in error


@pytest.mark.parametrize("command", ["convert", "decompose"])
def test_weights_that_were_fitted_are_trained_ones_and_fresh_ones_are_not(lowrank, tmp_path, command: str):
    run, file = tmp_path / "run", tmp_path / "net.safetensors"
    lowrank("train", "nin", "--data", "squares", *SMALL_RUN, "--out", run)
    assert lowrank(command, run, "--scheme", "lr-join(m=1)", "--out", file).exit_code == 0
    done = lowrank("evaluate", file, *CPU)
    told = "does not say which classes it tells apart" in str(done.exception)
    assert (done.exit_code == 0, told) == (command == "decompose", command == "convert")


def test_tables_for_people_have_top5_of_more_than_five_classes_alone(output_of, trained):
    shown = output_of("evaluate", trained, *CPU, "--per-class")
    for words in ("top-1", "Each class, the worst first", "calibration"):
        assert words in shown
    assert "top-5" not in shown  # of two classes, every answer is among the first five


def test_weights_of_an_unfinished_run_are_told_as_such(lowrank, train_small, trained, tmp_path, monkeypatch):
    def fail(*_):
        raise LowRankError("no more")

    monkeypatch.setattr("lowrank_cnn.train.loop.Trainer._train_epoch", fail)
    assert train_small("--out", tmp_path / "run").exit_code != 0
    for command in (("evaluate", tmp_path / "run", *CPU), ("predict", tmp_path / "run", trained / "a.png")):
        done = lowrank(*command)
        assert done.exit_code == 0, done.output
        assert "before any training, not those of a finished run" in done.stderr
