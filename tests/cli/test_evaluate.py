"""The commands evaluate and predict, as a user types them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import ResidentSplit, open_data
from lowrank_cnn.train import load_record
from lowrank_cnn.train.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("squares")
SMALL = ("--width", "0.1", "--epochs", "1", "--batch-size", "16", "--set", "crop=14", "--device", "cpu")


def test_train_evaluate_predict(lowrank, train_small, tmp_path):
    image = pytest.importorskip("PIL.Image")
    trained = train_small("--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    assert "batch_size=16" in trained.output
    assert "48 to train on" in trained.output
    evaluated = lowrank("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu", "--json")
    figures = json.loads(evaluated.output)
    assert figures["n"] == 10
    assert figures["top1"] == load_record(tmp_path / "run").result["top1"]
    image.new("L", (16, 16), 230).save(tmp_path / "a.png")
    answer = lowrank("predict", tmp_path / "run", tmp_path / "a.png", "--device", "cpu", "--json")
    [prediction] = json.loads(answer.output)
    assert {c["class"] for c in prediction["classes"]} == {"dark", "bright"}
    (tmp_path / "damaged.png").write_bytes(b"")
    files = [tmp_path / name for name in ("a.png", "missing.png", "damaged.png")]
    mixed = lowrank("predict", tmp_path / "run", *files, "--device", "cpu")
    assert mixed.exit_code == 1
    assert "there is no such file" in mixed.output
    assert "could not be read" in mixed.output


@pytest.mark.parametrize("limit", [(), ("--limit", "24")])
def test_a_flat_folder_is_evaluated_on_the_images_that_training_held_out(lowrank, tmp_path, monkeypatch, limit):
    monkeypatch.setattr("lowrank_cnn.data.open_data", open_data)  # real images, not the squares
    image = pytest.importorskip("PIL.Image")
    photos, run, shades = tmp_path / "photos", tmp_path / "run", {"dark": 20, "bright": 200}
    for name, shade in shades.items():
        (photos / name).mkdir(parents=True)
        for number in range(20):
            image.new("L", (16, 16), shade + number).save(photos / name / f"{number}.png")
    for number in range(3):  # left out, of the images to train on or of those to test on
        (photos / "dark" / f"broken{number}.png").write_text("no image")
    done = lowrank("train", "nin-c3-lr", "--data", photos, *SMALL, *limit, "--out", run)
    assert done.exit_code == 0, done.output
    again = lowrank("evaluate", run, "--data", photos, "--device", "cpu", "--json")
    record = load_record(run)
    n = record.data["test"]
    assert json.loads(again.stdout)["n"] == n < 10
    assert json.loads(again.stdout)["top1"] == record.result["top1"]
    assert f"these are the {n} images held out of it" in again.stderr
    for exported in (tmp_path / "net.safetensors", tmp_path / "net.onnx"):
        assert lowrank("export", run, exported).exit_code == 0
        assert json.loads(lowrank("evaluate", exported, "--data", photos, "--json").stdout)["n"] == n
    assert evaluate(run, photos, device="cpu", progress=False).n == n
    image.new("L", (16, 16), 9).save(photos / "dark" / "new.png")  # now it is another set, used as a whole
    whole = lowrank("evaluate", run, "--data", photos, "--json")
    assert json.loads(whole.stdout)["n"] == 41
    assert "trained on a set called photos, which held other images then" in whole.stderr
    with pytest.warns(UserWarning, match="may have been trained on most of these 41 images"):
        assert evaluate(run, photos, device="cpu", progress=False).n == 41


def test_evaluation_brings_images_to_the_size_of_training(lowrank, train_small, squares, tmp_path, monkeypatch):
    train_small("--out", tmp_path / "run")
    small = squares()
    asked = []

    def split(images: torch.Tensor, side: int) -> ResidentSplit:
        return ResidentSplit.of(torch.nn.functional.interpolate(images, (side, side)), torch.arange(10) % 2)

    def open_(*_, image_size=None, channels=None, **__):
        asked.append((image_size, channels))
        return replace(small, test=split(small.test.images, int(image_size or 80)))

    monkeypatch.setattr("lowrank_cnn.data.open_data", open_)
    arguments = ("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu", "--json")
    assert json.loads(lowrank(*arguments).output)["top1"] == load_record(tmp_path / "run").result["top1"]
    assert asked == [(None, None), (16, 1)]
    error = lowrank(*arguments, "--image-size", "40").exception
    assert isinstance(error, LowRankError)
    assert "1x16x16" in str(error)
    assert "--image-size 16" in str(error)


def test_images_that_cannot_be_brought_to_the_size_of_training_are_told(
    lowrank, train_small, squares, tmp_path, monkeypatch
):
    train_small("--out", tmp_path / "run")
    larger = ResidentSplit.of(torch.zeros(4, 1, 20, 20, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    found = replace(squares(), test=larger)

    def open_(*_, image_size=None, **__):
        if image_size:
            raise LowRankError("squares has images of 1x20x20, which image_size does not change.")
        return found

    monkeypatch.setattr("lowrank_cnn.data.open_data", open_)
    arguments = ("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu")
    says = r"trained on images of 1x16x16, and others are not brought to that: squares has images of 1x20x20"
    assert re.search(says, str(lowrank(*arguments).exception))
    found = replace(found, classes=("cat", "dog"))
    assert "has 2 others (cat, dog)" in str(lowrank(*arguments).exception)


def test_what_was_exported_from_a_run_is_used_as_the_run(lowrank, train_small, tmp_path):
    image = pytest.importorskip("PIL.Image")
    run, file, picture = tmp_path / "run", tmp_path / "net.safetensors", tmp_path / "a.png"
    train_small("--out", run)
    assert lowrank("export", run, file).exit_code == 0
    evaluated = lowrank("evaluate", file, "--data", "squares", "--device", "cpu", "--json")
    assert json.loads(evaluated.output)["loss"] == load_record(run).result["loss"]
    image.new("L", (16, 16), 230).save(picture)
    answers = [lowrank("predict", source, picture, "--device", "cpu", "--json").output for source in (run, file)]
    assert "bright" in answers[0]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("command", ["convert", "decompose"])
def test_weights_that_were_fitted_are_trained_ones_and_fresh_ones_are_not(lowrank, tmp_path, command: str):
    run, file = tmp_path / "run", tmp_path / "net.safetensors"
    lowrank("train", "nin", "--data", "squares", *SMALL, "--out", run)
    assert lowrank(command, run, "--scheme", "lr-join(m=1)", "--out", file).exit_code == 0
    done = lowrank("evaluate", file, "--data", "squares", "--device", "cpu")
    told = "does not say which classes it tells apart" in str(done.exception)
    assert (done.exit_code == 0) == (command == "decompose")
    assert told == (command == "convert")


def test_a_trained_network_is_fitted_to_images_of_its_data(lowrank, tmp_path, monkeypatch, squares):
    monkeypatch.setattr("lowrank_cnn.data.open_data", squares)
    run, file = tmp_path / "run", tmp_path / "net.safetensors"
    lowrank("train", "nin", "--data", "squares", *SMALL, "--out", run)
    done = lowrank("decompose", run, "--scheme", "separable(m=1)", "--images", "squares", "--json", "--out", file)
    assert done.exit_code == 0, done.exception
    assert all(0 <= row["error"] < 1 for row in json.loads(done.output)["fitted"])
    assert lowrank("evaluate", file, "--data", "squares", "--device", "cpu").exit_code == 0


def test_names_are_printed_as_they_are(lowrank, tmp_path, monkeypatch):
    pytest.importorskip("PIL.Image")
    answers = [[("[bold]cat", 0.75)], [(":dog:", 0.5)]]
    monkeypatch.setattr("lowrank_cnn.train.evaluate.predict", lambda *_, **__: answers)
    shown = lowrank("predict", "run", "[/b]/c.jpg", "[a] x.jpg").output
    for text in ("[/b]/c.jpg", "[a] x.jpg", "[bold]cat 75.0%", ":dog: 50.0%"):
        assert text in shown


def test_tables_for_people(lowrank, train_small, tmp_path):
    train_small("--out", tmp_path / "run")
    done = lowrank("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu")
    assert "top-1" in done.output
    assert "top-5" not in done.output  # of two classes, every answer is among the first five
    assert "finished" not in done.output


def test_top5_is_told_of_more_than_five_classes(lowrank, squares, monkeypatch):
    ten = replace(squares(), classes=tuple("abcdefghij"))
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *_, **__: ten)
    assert "top-5" in lowrank("evaluate", "nin", "--data", "squares", "--device", "cpu").output


def test_weights_of_a_run_that_did_not_come_to_its_end_are_told_as_such(
    lowrank, train_small, tmp_path, monkeypatch
):
    image = pytest.importorskip("PIL.Image")

    def fail(*_):
        raise LowRankError("no more")

    monkeypatch.setattr("lowrank_cnn.train.loop.Trainer._train_epoch", fail)
    assert train_small("--out", tmp_path / "run").exit_code != 0
    image.new("L", (16, 16), 230).save(tmp_path / "a.png")
    for command in (
        ("evaluate", tmp_path / "run", "--data", "squares"),
        ("predict", tmp_path / "run", tmp_path / "a.png"),
    ):
        done = lowrank(*command, "--device", "cpu")
        assert done.exit_code == 0, done.output
        assert "before any training, not those of a finished run" in done.stderr


def test_a_networks_name_is_evaluated_untrained_and_that_is_said(lowrank):
    done = lowrank("evaluate", "nin", "--data", "squares", "--device", "cpu", "--json")
    assert done.exit_code == 0
    assert "fresh weights" in done.output
    assert '"n": 10' in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("predict", "run", "x.png", "--top=-1"), "at least 1, not -1"),
        (("evaluate", "nin", "--data", "squares", "--pretrained", "cifar10", "--best"), "--best is for runs"),
        (("evaluate", __file__, "--data", "squares", "--pretrained", "cifar10"), "is for networks by name"),
        (("evaluate", "nowhere", "--data", "squares"), "neither a checkpoint nor a network's name"),
        (("predict", "nowhere", "x.png"), "neither a run's directory"),
        (("predict", "nowhere.onnx", "x.png"), "nowhere.onnx does not exist"),
        (("predict", "nin-c3-lr", "x.png"), "fresh weights, which can only guess: for trained ones give a run's"),
        (("predict", "nin-c3-lr", "x.png"), "or --pretrained cifar10"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(lowrank, arguments, sentence):
    error = lowrank(*arguments).exception
    assert isinstance(error, LowRankError)
    assert sentence in str(error)
