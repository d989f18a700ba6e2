"""Weights that come with the package."""

import json
from pathlib import Path

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.models import create_model, list_pretrained
from lowrank_cnn.models import network_file as module
from lowrank_cnn.models.network_file import read_pretrained, write_network_file


@pytest.fixture
def stored(tmp_path):
    torch.manual_seed(0)
    model = create_model("nin-c3-lr", width=0.1, norm="batch", num_classes=7)
    card = {"recipe": {}, "data": {"classes": list("abcdefg"), "image": [3, 32, 32]}}
    about = {"model": model.config, "conversion": {"changed": []}, "card": card, "dtype": "torch.float32"}
    halves = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    write_network_file(tmp_path / "nin-c3-lr.toys.safetensors", halves, about, {"mean": torch.tensor([0.5])})
    return model, tmp_path


def test_weights_come_back_to_half_precision(stored):
    model, folder = stored
    assert list_pretrained(folder) == [("nin-c3-lr", "toys")]
    found = read_pretrained("nin-c3-lr", "toys", folder)
    weights = found.weights()
    assert weights.keys() == model.state_dict().keys()
    for name, given in model.state_dict().items():
        ours = weights[name]
        assert torch.allclose(ours, given, rtol=1e-3, atol=1e-6), name
        assert ours.dtype == given.dtype
    assert found.preprocess()["mean"] == 0.5


def test_weights_that_are_missing_or_damaged_are_refused(stored):
    with pytest.raises(LowRankError, match="no weights of nin on toys; there are: nin-c3-lr on toys"):
        read_pretrained("nin", "toys", stored[1])
    path = stored[1] / "nin-c3-lr.toys.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LowRankError, match="damaged"):
        read_pretrained("nin-c3-lr", "toys", stored[1])


def test_a_layer_for_other_classes_begins_anew():
    ours = create_model("nin-c3-lr", pretrained="cifar10", num_classes=7)
    theirs = read_pretrained("nin-c3-lr", "cifar10").weights()
    fresh = [name for name, weight in ours.state_dict().items() if weight.shape != theirs[name].shape]
    assert fresh == ["features.classes.weight", "features.classes.bias"]
    for name, weight in ours.state_dict().items():
        assert name in fresh or torch.equal(weight, theirs[name].to(weight.dtype))
    assert ours.config["num_classes"] == 7
    assert notes(ours).begun_from == "nin-c3-lr on cifar10"


def test_dropout_is_as_it_was_trained_with_unless_asked_for_otherwise():
    def shares(**options: object) -> set[float]:
        net = create_model("nin-c3-lr", pretrained="cifar10", **options)
        return {part.p for part in net.modules() if isinstance(part, torch.nn.Dropout)}

    assert shares() == {read_pretrained("nin-c3-lr", "cifar10").card["recipe"]["dropout"]} == {0.0}
    assert shares(dropout=0.3) == {0.3}


@pytest.mark.parametrize(("name", "data"), list_pretrained())
def test_cards_say_what_the_committed_records_say(name: str, data: str):
    card = read_pretrained(name, data).card
    run = Path(__file__).parents[2] / "benchmarks" / "results" / data / "modern" / f"{name}-seed{card['seed']}"
    record = json.loads((run / "record.json").read_text())
    assert card["recipe"] == record["recipe"]
    assert card["trained"] == {key: record["result"][key] for key in card["trained"]}
    assert card["environment"]["commit"] == record["environment"]["commit"]
    assert card["halved"]["top1"] == pytest.approx(record["result"]["top1"], abs=0.001)
    assert card["halved"]["n"] == card["trained"]["n"] == record["result"]["n"] == 10_000
    net = create_model(name, pretrained=data)
    assert net.config.items() >= notes(net).training_card.card["model"].items()
    assert net(torch.randn(1, 3, 32, 32)).shape == (1, len(card["data"]["classes"]))
    with pytest.raises(LowRankError, match="norm='batch', not 'none'"):
        create_model(name, pretrained=data, norm="none")


def test_create_model_takes_them(stored, monkeypatch):
    model, folder = stored
    monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(read_pretrained, "__defaults__", (folder,))
    monkeypatch.setattr(list_pretrained, "__defaults__", (folder,))
    assert notes(create_model("nin-c3-lr", pretrained="default")).begun_from == "nin-c3-lr on toys"
    net = create_model("nin-c3-lr", pretrained="toys")
    assert not net.training
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(net(x), model.eval()(x), atol=1e-2)
    with pytest.raises(LowRankError, match=r"width=0\.1"):
        create_model("nin-c3-lr", pretrained="toys", width=0.5)
    with pytest.raises(LowRankError, match="there is no network"):
        create_model("nin-c3-lrr", pretrained="toys")


def test_the_paper_s_small_networks_come_with_weights():
    assert {name for name, data in list_pretrained() if data == "cifar10"} == {"nin", "nin-c3", "nin-c3-lr"}
