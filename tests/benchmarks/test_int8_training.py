"""The benchmark of training with int8 layers, with a small network on random images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from lowrank_cnn.data import Data, ResidentSplit, Standardize
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.trained import Trained


def pictures(n: int, seed: int) -> ResidentSplit:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, 8, 8), generator=draw, dtype=torch.uint8)
    return ResidentSplit.of(images, torch.arange(n) % 2)


def test_each_way_is_compared_with_training_in_int8(
    benchmark_module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("onnxruntime")
    benchmark = benchmark_module("int8_training")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    start = Trained(network, Standardize(torch.zeros(3), torch.ones(3)), Recipe(), ("a", "b"), (3, 8, 8))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    monkeypatch.setattr(benchmark, "decomposed", lambda options: start)
    data = Data("pictures", ("a", "b"), pictures(128, 0), pictures(40, 1))
    monkeypatch.setattr(benchmark, "open_data", lambda *_, **__: data)
    monkeypatch.setattr(benchmark, "WAYS", benchmark.WAYS[:2])
    benchmark.main(["--images", "64", "--test", "24", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["training"], row["in_float"], row["n"]) for row in record["rows"]] == [
        ("none", [], 24),
        ("int8", [], 24),
    ]
    none, int8 = record["rows"]
    assert none["int8_training_gains"]["loss"] == pytest.approx(100 * (int8["after"] - none["after"]))
    assert int8["int8_training_gains"]["loss"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
