"""The commands train, evaluate and predict, as a user types them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from lowrank_cnn.cli import deploy, models
from lowrank_cnn.cli.train import add_to
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.deploy.runtime import node_macs
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.train import load_record
from lowrank_cnn.train.trainer import Trainer

SMALL = ["--width", "0.05", "--epochs", "1", "--batch-size", "16", "--set", "crop=14", "--device", "cpu"]


def open_squares(*_: object, **__: object) -> Data:
    """Two kinds of grey squares."""

    def split(n: int) -> ResidentSplit:
        labels = torch.arange(n) % 2
        images = torch.randint(0, 90, (n, 1, 16, 16), generator=torch.Generator().manual_seed(n))
        return ResidentSplit.of((images + 150 * labels[:, None, None, None]).to(torch.uint8), labels)

    return Data("squares", ("dark", "bright"), split(48), split(10))


@pytest.fixture(autouse=True)
def small_images(monkeypatch) -> None:
    """The squares in place of whatever --data names."""
    monkeypatch.setattr("lowrank_cnn.cli.train.open_data", open_squares)


def lowrank(*arguments: object):
    app = typer.Typer()
    for commands in (add_to, deploy.add_to, models.add_to):
        commands(app)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def train(*more: object):
    return lowrank("train", "nin-c3-lr", "--data", "squares", *SMALL, *more)


def test_train_evaluate_predict(tmp_path):
    image = pytest.importorskip("PIL.Image")
    trained = train("--out", tmp_path / "run")
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


def test_evaluation_brings_images_to_the_size_of_training(tmp_path, monkeypatch):
    train("--out", tmp_path / "run")
    small = open_squares()
    asked = []

    def split(images: torch.Tensor, side: int) -> ResidentSplit:
        return ResidentSplit.of(torch.nn.functional.interpolate(images, (side, side)), torch.arange(10) % 2)

    def open_(*_, image_size=None, channels=None, **__):
        asked.append((image_size, channels))
        return replace(small, test=split(small.test.images, image_size or 80))

    monkeypatch.setattr("lowrank_cnn.cli.train.open_data", open_)
    arguments = ("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu", "--json")
    assert json.loads(lowrank(*arguments).output)["top1"] == load_record(tmp_path / "run").result["top1"]
    assert asked == [(None, None), (16, 1)]
    error = lowrank(*arguments, "--image-size", "40").exception
    assert isinstance(error, LowRankError)
    assert "1x16x16" in str(error)


def test_a_run_is_decomposed_and_trained_on(tmp_path):
    """Train, fit within a budget, fine-tune, evaluate, export: each command takes what the last one wrote."""
    small = tmp_path / "small.safetensors"
    steps = [
        ["train", "nin", "--data", "squares", *SMALL, "--out", tmp_path / "dense"],
        ["convert", tmp_path / "dense", "--scheme", "separable", "--macs", "0.5", "--out", small],
        ["train", small, "--data", "squares", *SMALL[2:], "--lr", "0.01", "--out", tmp_path / "tuned"],
        ["evaluate", tmp_path / "tuned", "--data", "squares", "--device", "cpu"],
        ["export", tmp_path / "tuned", tmp_path / "tuned.onnx"],
        ["count", tmp_path / "tuned"],
    ]
    for step in steps:
        done = lowrank(*step)
        assert done.exit_code == 0, (done.output, done.exception)
    dense, tuned = (load_record(tmp_path / name) for name in ("dense", "tuned"))
    assert tuned.model["name"] == "nin+separable"
    assert 0.4 < tuned.result["macs"] / dense.result["macs"] <= 0.5
    assert sum(node_macs(tmp_path / "tuned.onnx").values()) == tuned.result["macs"]


def test_a_network_in_the_users_file_is_trained_and_used(tmp_path):
    own, out = tmp_path / "mine.py", tmp_path / "run"
    own.write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))\n"
    )
    more = ["--data", "squares", *SMALL[2:]]
    assert lowrank("train", f"{own}:net", *more, "--scheme", "lr-join", "--out", out).exit_code == 0
    refused = lowrank("evaluate", out, "--data", "squares", "--device", "cpu").exception
    assert "--into path.py:function" in str(refused)
    evaluated = lowrank("evaluate", out, "--data", "squares", "--device", "cpu", "--into", f"{own}:net", "--json")
    assert json.loads(evaluated.output)["top1"] == load_record(out).result["top1"]
    image = pytest.importorskip("PIL.Image")
    image.new("L", (16, 16), 230).save(tmp_path / "a.png")
    predicted = lowrank("predict", out, tmp_path / "a.png", "--device", "cpu", "--into", f"{own}:net")
    assert predicted.exit_code == 0
    width = lowrank("train", f"{own}:net", *more, "--width", "0.5").exception
    assert "width can be set for our own networks" in str(width)


def test_names_are_printed_as_they_are(tmp_path, monkeypatch):
    pytest.importorskip("PIL.Image")
    answers = [[("[bold]cat", 0.75)], [(":dog:", 0.5)]]
    monkeypatch.setattr("lowrank_cnn.cli.train.predict", lambda *_, **__: answers)
    shown = lowrank("predict", "run", "[/b]/c.jpg", "[a] x.jpg").output
    for text in ("[/b]/c.jpg", "[a] x.jpg", "[bold]cat 75.0%", ":dog: 50.0%"):
        assert text in shown


def test_tables_for_people(tmp_path):
    train("--out", tmp_path / "run")
    assert "top-5" in lowrank("evaluate", tmp_path / "run", "--data", "squares", "--device", "cpu").output


def test_json_is_all_that_is_printed():
    figures = json.loads(train("--json").output)
    assert figures["n"] == 10
    assert figures["macs"] > 0


def test_every_field_of_the_recipe_can_be_set(tmp_path):
    train("--lr", "0.02", "--set", "momentum=0.5", "--set", "label-smoothing=0.2", "--out", tmp_path)
    recipe = load_record(tmp_path).recipe
    assert (recipe["lr"], recipe["momentum"], recipe["label_smoothing"]) == (0.02, 0.5, 0.2)


def test_the_network_takes_its_options_and_the_shape_of_the_data(tmp_path):
    train("--scheme", "dense", "--norm", "none", "--out", tmp_path)
    model = load_record(tmp_path).model
    assert (model["num_classes"], model["in_channels"], model["width"]) == (2, 1, 0.05)
    assert (model["scheme"], model["norm"]) == ("dense", None)


def test_a_directory_in_use_is_refused_and_resume_finds_it_done(tmp_path):
    train("--out", tmp_path)
    assert isinstance(error := train("--out", tmp_path).exception, LowRankError)
    assert "--resume" in str(error)
    again = train("--out", tmp_path, "--resume")
    assert again.exit_code == 0
    assert "has finished" in again.output


def test_ctrl_c_leaves_with_130_and_a_way_back(tmp_path, monkeypatch):
    look_around = Trainer._look_around

    def stop(self, request):
        request.received = True
        look_around(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_look_around", stop)
        stopped = train("--out", tmp_path)
    assert stopped.exit_code == 130
    assert "--resume" in stopped.stderr
    assert train("--out", tmp_path, "--resume").exit_code == 0
    assert load_record(tmp_path).status == "finished"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "nim", "--data", "squares"), "no network 'nim'"),
        (("train", "nin", "--data", "squares", "--recipe", "modem"), "did you mean modern"),
        (("train", "nin", "--data", "squares", "--set", "lrr=1"), "no field 'lrr'"),
        (("train", "nin", "--data", "squares", "--set", "batch_size=inf"), "batch_size wants"),
        (("train", "nin", "--data", "squares", "--seed", str(10**30)), "a seed lies between"),
        (("train", "nin", "--data", "squares", "--device", "meta"), "no device to compute on"),
        (("train", "nin", "--data", "squares", "--device", "cpu", "--workers=-1"), "workers are 0 or more"),
        (("predict", "run", "x.png", "--top=-1"), "at least 1, not -1"),
        (("evaluate", "nowhere", "--data", "squares"), "neither a checkpoint nor a network's name"),
        (("predict", "nowhere", "x.png"), "neither a run's directory"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(arguments, sentence):
    error = lowrank(*arguments).exception
    assert isinstance(error, LowRankError)
    assert sentence in str(error)


def test_a_networks_name_is_evaluated_untrained_and_that_is_said():
    done = lowrank("evaluate", "nin", "--data", "squares", "--device", "cpu", "--json")
    assert done.exit_code == 0
    assert "fresh weights" in done.output
    assert '"n": 10' in done.output
