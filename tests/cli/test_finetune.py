"""From trained weights to a cheaper network: decomposed or pruned, and fine-tuned with the original as teacher."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.notes import note, notes
from tests.cli.conftest import invoke

FILE = """
from torch import nn

def block(c, d):
    return nn.Sequential(nn.Conv2d(c, d, 3, padding=1, bias=False), nn.BatchNorm2d(d), nn.ReLU(), nn.MaxPool2d(2))

def make(num_classes=10):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))
    return nn.Sequential(block(1, 16), block(16, 32), block(32, 32), head)
"""
DIGITS = ("--data", "digits", "--limit", "400", "--device", "cpu")
SHORT = (*DIGITS, "--recipe", "finetune", "--epochs", "1", "--set", "mirror=false")
LONG = (*DIGITS, "--recipe", "digits", "--batch-size", "32", "--epochs", "5")


def make(num_classes: int = 10) -> nn.Module:
    space: dict = {}
    exec(FILE, space)
    return space["make"](num_classes)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a small network, trained on digits; the file that builds it is beside the run."""
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "small.py").write_text(FILE)
    done = invoke("train", f"{folder}/small.py:make", *LONG, "--out", folder / "dense", "--json")
    assert json.loads(done.stdout)["top1"] > 0.8, done.output
    return folder / "dense"


def test_a_pruned_network_keeps_what_it_learned_and_learns_on_from_its_teacher(dense: Path):
    data, trained = lr.open_data("digits", limit=400), lr.load(dense, into=make())
    how = {"macs": 0.6, "multiple": 4, "input_size": (1, 28, 28)}
    small, fresh = lr.prune(trained, **how), lr.thin(trained, **how)
    note(fresh, training_card=notes(trained).training_card)
    before = lr.evaluate(small, data, progress=False).top1
    assert before > lr.evaluate(fresh, data, progress=False).top1 + 0.15
    lr.fit(small, data, "finetune", epochs=1, teacher=trained, mirror=False, progress=False)
    assert lr.evaluate(small, data, progress=False).top1 > before + 0.2


@pytest.mark.parametrize("cheaper", [("--thin", "0.5"), ("--scheme", "separable", "--macs", "0.5")])
def test_a_run_made_cheaper_is_taught_by_itself_and_beats_its_shape_from_scratch(
    dense: Path, cheaper: tuple, output_of: Callable[..., str], tmp_path: Path
):
    into = f"{dense.parent}/small.py:make"
    printed = output_of("train", dense, "--into", into, *cheaper, *SHORT, "--out", tmp_path / "small")
    assert "The network as it was is the teacher" in printed
    scratch = json.loads(output_of("train", into, *cheaper, *SHORT, "--json"))
    taught = json.loads(output_of("evaluate", tmp_path / "small", "--into", into, *DIGITS, "--json"))
    assert taught["top1"] > scratch["top1"] + 0.2
    record = json.loads((tmp_path / "small" / "record.json").read_text())
    assert record["result"]["macs"] == pytest.approx(0.5 * record["result"]["dense"]["macs"], rel=0.15)
    assert record["begun_from"] == "dense"


def test_weights_of_another_library_are_pruned_for_new_classes(
    dense: Path, output_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    timm, trained = ModuleType("timm"), lr.load(dense, into=make()).state_dict()

    def create_model(name: str, pretrained: bool, num_classes: int = 10) -> nn.Module:
        network = make(num_classes)
        if pretrained:
            network.load_state_dict(trained)
            network[3][2].reset_parameters()
        return network

    timm.list_models, timm.create_model = lambda: ["small"], create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    words = ("train", "timm:small", "--pretrained", "--thin", "0.5", *SHORT, "--lr", "0.05", "--out", tmp_path)
    printed = output_of(*words)
    assert "The last layer is new, for 10 classes; the others begin with trained weights." in printed
    assert "the channels of the largest weights stay" in printed
    assert "teacher" not in printed  # it knows other classes
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["begun_from"] == "timm:small, default"
    assert record["result"]["top1"] > 0.4


def test_the_teacher_may_be_a_network_of_one_s_own(dense: Path, output_of: Callable[..., str]):
    """It is built by the function of the student. At this weight nothing but its answers is learned."""
    model = f"{dense.parent}/small.py:make"
    words = ("--limit", 240, "--lr", 0.1, "--epochs", 5, "--set", "distill_weight=1", "--teacher", dense, "--json")
    assert json.loads(output_of("train", model, *SHORT, *words))["top1"] > 0.3


@pytest.mark.usefixtures("squares")
def test_a_run_of_one_s_own_network_gets_a_last_layer_for_other_classes(
    dense: Path, output_of: Callable[..., str]
):
    words = ["--data", "squares", "--recipe", "finetune", "--device", "cpu", "--epochs", "1", "--into"]
    printed = output_of("train", dense, *words, f"{dense.parent}/small.py:make")
    assert "The last layer is new, for 2 classes; the others begin with trained weights." in printed
