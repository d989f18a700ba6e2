"""The command train, as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowrank_cnn.cli.app import run
from lowrank_cnn.cli.train import TrainingOptions
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.models import create_model
from lowrank_cnn.train import load_record
from lowrank_cnn.train.evaluate import load_checkpoint
from tests.cli.conftest import SMALL_RUN
from tests.support import node_macs

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("squares")


def test_a_run_is_decomposed_and_trained_on(lowrank, tmp_path):
    """Train, fit within a budget, fine-tune, evaluate, export: each command takes what the last one wrote."""
    small = tmp_path / "small.safetensors"
    steps = [
        ["train", "nin", "--data", "squares", *SMALL_RUN, "--out", tmp_path / "dense"],
        ["convert", tmp_path / "dense", "--scheme", "separable", "--macs", "0.5", "--out", small],
        ["train", small, "--data", "squares", *SMALL_RUN[2:], "--lr", "0.01", "--out", tmp_path / "tuned"],
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


def own_network(folder: Path, filters: int = 4) -> Path:
    path = folder / "mine.py"
    path.write_text(
        f"from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(1, {filters}, 3, padding=1), "
        f"nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({filters}, 2))\n"
    )
    return path


def test_code_is_run_only_as_this_user_named_it(lowrank, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own, out, evaluate = own_network(tmp_path), tmp_path / "run", ("--data", "squares", "--device", "cpu")
    assert lowrank("train", f"{own}:net", "--data", "squares", *SMALL_RUN[2:], "--out", out).exit_code == 0
    ran = tmp_path / "ran"
    notes, text = tmp_path / "state" / "lowrank-cnn" / "networks.json", own.read_text()

    def refused(run: Path = out) -> bool:
        said = str(lowrank("evaluate", run, *evaluate).exception)
        return "--into mine.py:net" in said and not ran.exists()

    assert not refused()
    elsewhere = shutil.copytree(out, tmp_path / "elsewhere")  # as from somebody else, with a file of its own
    (elsewhere / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n{text}")
    assert refused(elsewhere)
    own.write_text(f"open({str(ran)!r}, 'w')\n{text}")  # not what was named
    assert refused()
    own.write_text(text)
    notes.chmod(0o666)  # another user may have written it
    assert refused()
    notes.chmod(0o600)
    assert not refused()


def test_a_network_in_the_users_file_is_trained_and_used(lowrank, tmp_path):
    own, out = own_network(tmp_path), tmp_path / "run"
    more = ["--data", "squares", *SMALL_RUN[2:]]
    assert lowrank("train", f"{own}:net", *more, "--scheme", "lr-join", "--out", out).exit_code == 0
    evaluate = ("--data", "squares", "--device", "cpu", "--json")
    for into in (("--into", f"{own}:net"), ()):  # the second time it is known
        evaluated = lowrank("evaluate", out, *evaluate, *into)
        assert json.loads(evaluated.stdout)["top1"] == load_record(out).result["top1"]
    assert f"--into {own}:net, as before" in evaluated.stderr
    counted = lowrank("count", out, "--json")  # which builds it twice
    assert json.loads(counted.stdout)["macs"]
    assert counted.stderr.count("as before") <= 1
    image = pytest.importorskip("PIL.Image")
    image.new("L", (16, 16), 230).save(tmp_path / "a.png")
    predicted = lowrank("predict", out, tmp_path / "a.png", "--device", "cpu", "--into", f"{own}:net")
    assert predicted.exit_code == 0
    width = lowrank("train", f"{own}:net", *more, "--width", "0.5").exception
    assert "width can be set for our own networks" in str(width)


def test_a_thinner_network_is_trained_and_used(lowrank, tmp_path):
    own, out = own_network(tmp_path, 8), tmp_path / "run"
    more = ["--data", "squares", *SMALL_RUN[2:], "--thin", "0.5", "--out", out]
    assert "+thin(0." in lowrank("train", f"{own}:net", *more, "--json").output
    record = load_record(out)
    assert record.result["macs"] < 0.7 * record.result["dense"]["macs"]
    evaluated = lowrank("evaluate", out, "--data", "squares", "--device", "cpu", "--into", f"{own}:net", "--json")
    assert json.loads(evaluated.output)["top1"] == record.result["top1"]


def test_what_is_said_at_the_end_can_be_typed(lowrank, train_small, tmp_path):
    """For one of ours, for a converted network of the user's own, and for one that goes on with its weights."""
    named, run = f"{own_network(tmp_path)}:net", tmp_path / "a run"
    more = ["--data", "squares", *SMALL_RUN[2:]]
    runs = [
        train_small("--out", tmp_path / "ours"),
        lowrank("train", named, *more, "--scheme", "lr-join", "--out", run),
        lowrank("train", run, *more, "--into", named, "--out", tmp_path / "further"),
    ]
    for done in runs:
        assert done.exit_code == 0, done.output
        (hint,) = re.findall(r"try `lowrank (.*)`", done.output)
        assert lowrank(*shlex.split(hint), "--device", "cpu").exit_code == 0, hint
    assert "lr-join" in load_record(tmp_path / "further").model["name"]


def test_a_bad_network_is_refused_before_the_images_are_opened(lowrank, tmp_path, monkeypatch):
    def open_(*_, **__):
        raise AssertionError("the images were opened")

    monkeypatch.setattr("lowrank_cnn.data.open_data", open_)
    named = f"{own_network(tmp_path)}:net"
    mistakes = [
        (["nin", "--scheme", "rl"], "no scheme 'rl'"),
        (["nin", "--width", "0"], "width must be a number above 0"),
        (["nin", "--set", "norm=layer"], "norm is None or 'batch'"),
        (["vgg11", "--recipe", "nin-modern"], "vgg11 has none"),
        ([named, "--scheme", "rl"], "no scheme 'rl'"),
        ([named, "--width", "2"], "taken as it is"),
        ([named, "--set", "norm=batch"], "taken as it is"),
    ]
    for words, says in mistakes:
        error = lowrank("train", *words, "--data", "squares").exception
        assert isinstance(error, LowRankError)
        assert says in str(error)


def test_json_is_all_that_is_printed(train_small):
    figures = json.loads(train_small("--json").output)
    assert figures["n"] == 10
    assert figures["macs"] > 0


def test_the_network_takes_its_options_and_the_shape_of_the_data(train_small, tmp_path):
    train_small("--scheme", "dense", "--set", "norm=none", "--set", "pool=average", "--out", tmp_path)
    model = load_record(tmp_path).model
    assert (model["num_classes"], model["in_channels"], model["width"]) == (2, 1, 0.05)
    assert (model["scheme"], model["norm"], model["pool"]) == ("dense", None, "average")


def test_a_directory_in_use_is_refused_and_resume_finds_it_done(train_small, tmp_path):
    train_small("--out", tmp_path)
    assert isinstance(error := train_small("--out", tmp_path).exception, LowRankError)
    assert "--resume" in str(error)
    again = train_small("--out", tmp_path, "--resume")
    assert again.exit_code == 0
    assert "has finished" in again.output


def in_colour(data: Data) -> Data:
    def coloured(split: Any) -> ResidentSplit:
        return ResidentSplit.of(split.images.expand(-1, 3, -1, -1).contiguous(), split.labels)

    return replace(data, train=coloured(data.train), test=coloured(data.test))


def test_trained_weights_are_trained_on_and_the_record_says_so(lowrank, squares, tmp_path, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *_, **__: in_colour(squares()))
    fields = ("crop=none", "pad=0", "cutout=0", "freeze=features.conv1*", "epochs=1", "batch_size=16")
    small = [word for field in fields for word in ("--set", field)]
    named = ("train", "nin-c3-lr", "--pretrained", "cifar10", "--data", "squares")
    done = lowrank(*named, "--out", tmp_path, "--device", "cpu", *small)
    assert done.exit_code == 0, done.output
    assert "begins with trained weights (nin-c3-lr on cifar10)" in done.output.replace("\n", " ")
    record = load_record(tmp_path)
    assert record.begun_from == "nin-c3-lr on cifar10"
    assert (record.model["num_classes"], record.model["norm"]) == (2, "batch")
    kept, theirs = load_checkpoint(tmp_path).network, create_model("nin-c3-lr", pretrained="cifar10")
    name = "features.conv1_1.weights.0"
    assert torch.equal(kept.state_dict()[name], theirs.state_dict()[name])
    assert notes(kept).begun_from == tmp_path.name


@pytest.mark.parametrize("names", [("dark", "bright"), ("dark", "light")])
def test_a_last_layer_is_kept_for_the_same_classes_alone(
    lowrank, train_small, squares, tmp_path, monkeypatch, names
):
    assert train_small("--out", tmp_path / "run").exit_code == 0
    found = replace(squares(), classes=names)
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *_, **__: found)
    done = lowrank("train", tmp_path / "run", "--data", "squares", *SMALL_RUN[2:], "--out", tmp_path / "tuned")
    assert done.exit_code == 0, (done.output, done.exception)
    assert ("The last layer is new, for 2 classes" in done.output) == (names != ("dark", "bright"))


@pytest.fixture
def photographs(tmp_path, monkeypatch) -> Path:
    """A flat folder of 24 grey photographs of two kinds, of many sizes, opened as they are."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.undo()
    for number in range(24):
        name, folder = f"{number}.png", tmp_path / "photos" / ("dark", "bright")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (16 + number % 3, 16), 20 + 200 * (number % 2) + number).save(folder / name)
    return tmp_path / "photos"


def test_the_first_hour_with_ones_own_photographs(lowrank, photographs, tmp_path):
    """A flat folder, no size, no split, a network for colour: trained, evaluated, asked, all by one line each."""
    own, run = own_network(tmp_path), tmp_path / "run"
    own.write_text(own.read_text().replace("Conv2d(1,", "Conv2d(3,") + "net.input_size = (3, 12, 12)\n")
    small = ("--epochs", "1", "--batch-size", "8", "--set", "cutout=2", "--device", "cpu")
    done = lowrank("train", "nin", "--width", "0.05", "--data", photographs, "--out", run, *small)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "5 images, about 20% of each class, are held out" in " ".join(done.output.split())
    assert "30x30 pixels" in done.output
    assert "size that the network is for" in done.output
    record = load_record(run)
    assert (record.data["train"], record.data["test"], record.data["image"]) == (19, 5, [1, 30, 30])
    assert record.data["val_split"] == {"share": 0.2, "seed": 0}
    assert sum(row["n"] for row in record.result["details"]["per_class"]) == 5
    colour = ("train", f"{own}:net", "--data", photographs, "--image-size", "12x14", "--out", tmp_path / "colour")
    assert lowrank(*colour, *small).exit_code == 0
    assert load_record(tmp_path / "colour").data["image"] == [3, 12, 14]
    evaluated = lowrank("evaluate", run, "--data", photographs, "--device", "cpu", "--per-class")
    assert evaluated.exit_code == 0, (evaluated.output, evaluated.exception)
    assert "calibration" in evaluated.output
    only = lowrank("evaluate", run, "--data", photographs, "--device", "cpu", "--json", "--limit", "4")
    assert json.loads(only.stdout)["n"] == 4
    (photographs / "dark" / "broken.png").write_bytes(b"no image")
    asked = lowrank("predict", run, photographs, "--device", "cpu", "--json")
    assert asked.exit_code == 1
    assert len(json.loads(asked.stdout)) == 25
    assert "1 of 25 images could not be read" in asked.stderr


def test_one_class_is_refused_before_anything_is_printed(lowrank, monkeypatch):
    data = Data("photos", ("cat",), *(ResidentSplit(None, (1, 16, 16)) for _ in range(2)))  # type: ignore[arg-type]
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *_, **__: data)
    refused = lowrank("train", "nin", "--data", "photos", "--device", "cpu")
    assert "photos has fewer than two classes (cat)" in str(refused.exception)
    assert not refused.output


def test_bad_images_that_a_stream_finds_are_told_at_the_end(lowrank, photographs, monkeypatch):
    (photographs / "dark" / "bad.png").write_bytes(b"junk")
    data = open_data(photographs)
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *_, **__: data)
    done = lowrank("train", "nin-c3-lr", "--data", "photos", *SMALL_RUN, "--batch-size", "4")
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert told.index("epoch 1/1") < told.index("1 undecodable image (photos/dark/bad.png")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--precision", "bf16"], "--precision is a setting: --set precision=VALUE."),
        (["--no-compile"], "--no-compile is a setting: --set compile=false."),
        (["--hold-gb=3"], "--hold-gb is a setting: --set hold_gb=VALUE."),
        (["--name", "modern"], "No such option"),
        (["--widht", "2"], "No such option"),
    ],
)
def test_a_setting_typed_as_an_option_is_explained(capsys, words, says):
    assert run(["train", "nin", "--data", "digits", *words]) == 2
    assert says in capsys.readouterr().err


SETTINGS = ("norm=batch", "stride=2", "precision=bf16", "quantize=int8", "cuda-graphs=false", "compile=false")
SETTINGS += ("checkpoint-every=60", "hold-gb=8", "channels=1", "bad=refuse", "lr=0.1")


def test_a_setting_is_found_in_the_recipe_the_run_the_network_or_the_images():
    recipe, _, rare = TrainingOptions("modern", epochs=3, lr=0.02, settings=[*SETTINGS]).read(
        {"epochs": 9, "batch_size": 32, "cuda_graphs": "true"}
    )
    assert (recipe.epochs, recipe.batch_size, recipe.lr) == (3, 32, 0.1)
    assert (recipe.norm, recipe.precision, recipe.quantize) == ("batch", "bf16", "int8")
    assert (rare["stride"], rare["hold_gb"], rare["channels"], rare["bad"]) == (2, 8.0, 1, "refuse")
    assert (rare["norm"], rare["cuda_graphs"], rare["compile"], rare["checkpoint_every"]) == (
        "batch",
        "false",
        "false",
        "60",
    )
