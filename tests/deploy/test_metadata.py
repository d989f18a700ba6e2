"""Exported files carry classes and the preparation of images: evaluate and predict take them like the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import Data, ResidentSplit, Standardize, Whiten
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.metadata import attach_metadata, metadata_of
from lowrank_cnn.train.evaluate import evaluate, predict
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained, carried_by

CLASSES = ("cat", "dog", "owl")
SIZE = (3, 12, 12)


def pixels(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def trained(preprocess: Standardize | Whiten | None = None, **recipe: object) -> Trained:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).eval()
    prepare = preprocess or Standardize(torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 50.0, 70.0]))
    return Trained(net.eval(), prepare, Recipe(**recipe), CLASSES, SIZE)


def data() -> Data:
    labels = torch.arange(20) % 3
    split = ResidentSplit.of(pixels(20), labels)
    return Data("random", CLASSES, split, split)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".ts"])
def test_a_file_is_evaluated_and_asked_as_its_run_is(suffix: str, tmp_path: Path):
    run, path = trained(crop=10), tmp_path / f"net{suffix}"
    assert export(run, path).error < 1e-4
    file = load(path, trusted=True)
    right, found = evaluate(run, data(), progress=False), evaluate(file, data(), progress=False)
    assert (found.top1, found.n) == (right.top1, 20)
    assert found.loss == pytest.approx(right.loss, rel=1e-4)
    image = pixels(1, seed=4)[0]
    (expected,), (answer,) = predict(run, image), predict(file, image)
    assert [name for name, _ in answer] == [name for name, _ in expected]
    if suffix == ".onnx":
        assert evaluate(path, data(), progress=False).top1 == right.top1
        assert json.loads(open_engine(path).metadata["classes"]) == list(CLASSES)
    else:
        with pytest.raises(LowRankError, match="trusted"):
            evaluate(path, data(), progress=False)


@pytest.mark.parametrize(("layout", "suffix"), [("nchw", ".pt2"), ("nhwc", ".onnx")])
def test_a_graph_that_prepares_images_takes_pixels(layout: str, suffix: str, tmp_path: Path):
    run, path = trained(), tmp_path / f"net{suffix}"
    export(run, path, preprocess=layout)
    images = pixels(4, seed=2)
    expected = run.network(run.preprocess(images))
    given = images.permute(0, 2, 3, 1).contiguous() if layout == "nhwc" else images
    file = load(path, trusted=True)
    torch.testing.assert_close(file(given), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(file(images.float()), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(LowRankError, match="prepares images itself"):
        file(run.preprocess(images))
    assert evaluate(file, data(), progress=False).top1 == evaluate(run, data(), progress=False).top1


def test_whitened_images_are_whitened_by_the_file(tmp_path: Path):
    size = 3 * 12 * 12
    run = trained(Whiten(torch.zeros(size), torch.eye(size) + 0.01), crop=8)
    export(run, tmp_path / "net.ts")
    export(run, tmp_path / "inside.ts", preprocess=True)
    right = evaluate(run, data(), progress=False)
    for name in ("net.ts", "inside.ts"):
        found = evaluate(load(tmp_path / name, trusted=True), data(), progress=False)
        assert found.loss == pytest.approx(right.loss, rel=1e-4)


def test_metadata_is_read_back_and_damage_is_refused():
    held_out = {"digest": "d", "train": 5, "val_split": {"share": 0.2, "seed": 0}}
    kept = metadata_of(replace(trained(crop=10), held_out=held_out).stored())
    assert json.loads(kept["crop"]) == [10, 10]
    back = carried_by(attach_metadata(nn.Identity(), kept))
    assert (back.classes, back.image, back.input_size) == (CLASSES, SIZE, (3, 10, 10))
    assert back.held_out == held_out
    of_others = {"classes": "[", "recipe": "{}"}
    assert notes(attach_metadata(nn.Identity(), of_others)).training_card is None
    damage = {"mean": "x", "recipe": '{"epochs": "many"}', "whitening": '"?"', "held_out": "[1]", "image": "3"}
    for bad in ({key: value} for key, value in damage.items()):
        with pytest.raises(LowRankError, match="export the network again"):
            attach_metadata(nn.Identity(), {**kept, **bad})
