"""What was exported from a run is as good as the run: it is evaluated and asked as the run is."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit, get_recipe
from lowrank_cnn.train.evaluate import evaluate, predict
from lowrank_cnn.train.trained import carried_by, load_checkpoint, load_pretrained

RECIPE = get_recipe("modern", epochs=1, batch_size=16, warmup=0, mirror=False, crop=14, zca_epsilon=1.0, ema=0.5)


def halves(n: int) -> ResidentSplit:
    """Grey 16x16 images, bright above or below."""
    labels = torch.arange(n) % 2
    images = torch.randint(0, 90, (n, 1, 16, 16), generator=torch.Generator().manual_seed(n))
    images[labels == 0, :, :8] += 150
    return ResidentSplit.of(images.to(torch.uint8), labels)


@pytest.fixture
def data() -> Data:
    return Data("halves", ("above", "below"), halves(32), halves(21))


def own() -> nn.Module:
    pool = nn.AdaptiveAvgPool2d((2, 1))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("preprocess", ["standardize", "whiten"])
def test_an_exported_run_is_evaluated_as_the_run(data, tmp_path, preprocess: str):
    image = pytest.importorskip("PIL.Image")
    torch.manual_seed(0)
    network = create_model("nin-c3-lr", num_classes=2, in_channels=1, width=0.05)
    recipe = dataclasses.replace(RECIPE, preprocess=preprocess)
    record = fit(network, data, recipe, out=tmp_path / "run", progress=False, device="cpu")
    path = tmp_path / "net.safetensors"
    export(load_checkpoint(tmp_path / "run"), path)
    assert evaluate(path, data, device="cpu").to_dict().items() <= record.result.items()
    image.fromarray(data.test.images[0, 0].numpy()).save(tmp_path / "a.png")
    answers = [predict(source, [tmp_path / "a.png"], device="cpu") for source in (tmp_path / "run", path)]
    assert answers[0] == answers[1]
    assert notes(load(path)).input_size == notes(load(tmp_path / "run")).input_size == (1, 14, 14)


def test_a_network_of_others_is_passed_in(data, tmp_path):
    record = fit(convert(own(), "lr"), data, RECIPE, out=tmp_path / "run", progress=False, device="cpu")
    path = tmp_path / "own.safetensors"
    export(load_checkpoint(tmp_path / "run", network=own()), path)
    trained = load_checkpoint(path, network=own())
    assert evaluate(trained, data, device="cpu").loss == record.result["loss"]
    with pytest.raises(LowRankError, match="Sequential is not one of our networks"):
        evaluate(path, data, device="cpu")


def test_weights_that_come_with_the_package_are_exported_whole(tmp_path):
    pretrained = load_pretrained("nin-c3-lr", "cifar10")
    export(pretrained, tmp_path / "net.safetensors")
    again = load_checkpoint(tmp_path / "net.safetensors")
    assert (again.classes, again.image, again.recipe) == (pretrained.classes, (3, 32, 32), pretrained.recipe)
    for name, value in pretrained.preprocess.to_dict().items():
        assert torch.equal(again.preprocess.to_dict()[name], value)


def test_a_file_of_weights_alone_says_why_it_cannot_be_evaluated(data, tmp_path):
    path = tmp_path / "net.safetensors"
    export(create_model("nin", num_classes=2, in_channels=1, width=0.05), path)
    with pytest.raises(LowRankError, match=r"does not say which classes .*lowrank export RUN net\."):
        evaluate(path, data, device="cpu")


@pytest.mark.parametrize("card", [{}, {"data": 3, "recipe": {}}, {"data": {"classes": 2}, "recipe": {}}])
def test_a_damaged_card_is_told(tmp_path, card: dict):
    path = tmp_path / "net.safetensors"
    export(load_pretrained("nin-c3-lr", "cifar10"), path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["lowrank_cnn"])
    save_file(load_file(path), path, metadata={"lowrank_cnn": json.dumps({**about, "card": card})})
    with pytest.raises(LowRankError, match="card of its network is damaged"):
        load_checkpoint(path)


def brighter(split: ResidentSplit) -> ResidentSplit:
    return ResidentSplit.of(split.images // 2 + 100, split.labels)


def test_a_loaded_network_prepares_images_as_its_run_did(data, tmp_path):
    """Other images have another mean; the network was trained for that of its own."""
    torch.manual_seed(0)
    network = create_model("nin-c3-lr", num_classes=2, in_channels=1, width=0.05, norm="batch")
    fit(network, data, RECIPE, out=tmp_path / "run", progress=False, device="cpu")
    others = Data("others", data.classes, brighter(data.train), brighter(data.test))
    right = evaluate(tmp_path / "run", others, device="cpu")
    export(load(tmp_path / "run"), tmp_path / "net.safetensors")
    carried = (load(tmp_path / "run"), load(tmp_path / "net.safetensors"), network, copy.deepcopy(network))
    assert [evaluate(net, others, device="cpu") for net in carried] == [right] * 4
    assert evaluate(network, others, recipe=RECIPE, device="cpu").loss != right.loss


def test_a_network_with_the_packages_weights_carries_its_preparation():
    network = create_model("nin-c3-lr", pretrained="cifar10")
    carried = carried_by(network)
    assert carried is not None
    assert carried.classes == load_pretrained("nin-c3-lr", "cifar10").classes
    assert carried_by(create_model("nin-c3-lr", pretrained="cifar10", num_classes=3)) is None


def test_a_loaded_network_is_asked_without_its_directory(data, tmp_path):
    image = pytest.importorskip("PIL.Image")
    fit(network := own(), data, RECIPE, progress=False, device="cpu")
    image.fromarray(data.test.images[0, 0].numpy()).save(tmp_path / "a.png")
    [[(name, _), _]] = predict(network, tmp_path / "a.png", device="cpu")
    assert name in data.classes
    with pytest.raises(LowRankError, match="predict needs a trained network"):
        predict(own(), tmp_path / "a.png", device="cpu")
