"""`lowrank train` learns shapes, and trains with learned ones."""

from __future__ import annotations

import json

import lowrank_cnn as lr
from lowrank_cnn.cli.app import run
from lowrank_cnn.graph.finalize_shapes import has_learned
from lowrank_cnn.train import load_record
from lowrank_cnn.train.trained import load_checkpoint

SMALL = ["nin", "--data", "digits", "--limit", "20", "--width", "0.05", "--epochs", "2", "--batch-size", "10"]


def test_shapes_are_learned_and_used_again(tmp_path, capsys):
    first, second = tmp_path / "learned", tmp_path / "again"
    scheme = ["--scheme", "learned(kx1, 1xk, 1x1, kxk, multiple=4)", "--macs", "0.5"]
    assert run(["train", *SMALL, *scheme, "--out", str(first)]) == 0
    assert "of the MACs" in capsys.readouterr().out
    rows = json.loads((first / "shapes.json").read_text())["learned_shapes"]
    assert "features.conv1_1" in rows
    result = load_record(first).result
    assert result["macs"] <= 0.5 * result["dense"]["macs"]
    network = load_checkpoint(first).network
    assert not has_learned(network)
    assert lr.count(network, (1, 28, 28)).macs == result["macs"]
    assert run(["train", *SMALL, "--shapes", str(first / "shapes.json"), "--out", str(second), "--json"]) == 0
    assert load_record(second).result["macs"] == result["macs"]
    assert run(["evaluate", str(second), "--data", "digits", "--limit", "10", "--json"]) == 0


OWN = """
from torch import nn

def make():
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)
"""


def test_the_shapes_of_a_network_of_ones_own_are_drawn(tmp_path):
    own, out, figure = tmp_path / "own.py", tmp_path / "run", tmp_path / "shapes.svg"
    own.write_text(OWN)
    model = [f"{own}:make", "--data", "digits", "--limit", "20", "--epochs", "2", "--batch-size", "10"]
    scheme = ["--scheme", "learned(kx1, 1xk)", "--macs", "0.4"]
    assert run(["train", *model, *scheme, "--out", str(out), "--json"]) == 0
    drawing = ["figure", "shapes", "--out", str(figure)]
    assert run([*drawing, "--model", str(out), "--into", f"{own}:make"]) == 0
    assert "3x1" in figure.read_text() or "1x3" in figure.read_text()
