"""A network comes back from what is written about it, conversions included, and nothing stored is run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import entry_description, rebuild, rebuild_options, run_entry, with_classes


def through_json(value):
    return json.loads(json.dumps(value))


def own() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def converted() -> nn.Module:
    net = convert(create_model("nin", width=0.1), "lr", where="*conv1*")
    return decompose(net, "separable", macs=0.6, input_size=(3, 16, 16))


def test_an_unconverted_network_is_its_options():
    net = create_model("nin-c3-lr", num_classes=3, width=0.1)
    assert run_entry(net) == net.config
    assert rebuild(entry_description(through_json(run_entry(net)))).config == net.config


def test_a_converted_network_is_built_again_layer_by_layer():
    net = converted()
    entry = through_json(run_entry(net))
    assert entry["name"] == "nin+lr+separable"
    again = rebuild(entry_description(entry))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}
    assert run_entry(again) == entry
    again.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 30, 30)
    torch.testing.assert_close(again.eval()(x), net.eval()(x), rtol=0, atol=0)


def test_a_network_of_others_is_rewritten_or_taken_as_it_is():
    net = convert(own(), "lr-join(m=4)", where="0")
    entry = through_json(run_entry(net))
    assert entry["name"] == "Sequential+lr-join"
    with pytest.raises(LowRankError, match=r"Sequential is not one of our networks.*load\(path, into=network\)"):
        rebuild(entry_description(entry))
    base = own()
    again = rebuild(entry_description(entry), into=base)
    again.load_state_dict(net.state_dict())
    assert isinstance(base[0], nn.Conv2d)
    assert rebuild(entry_description(entry), into=again) is again
    plain = own()
    assert rebuild(entry_description(run_entry(plain)), into=plain) is plain


def test_a_network_of_others_keeps_the_name_that_its_user_gave_it():
    net = own()
    note(net, name="own.py:net")
    entry = through_json(run_entry(net))
    assert entry == {"name": "own.py:net", "class": "Sequential"}
    assert entry_description(entry)["class"] == "Sequential"
    called = {**entry, "base": "own.py:make", "name": "own.py:make"}
    with pytest.raises(LowRankError, match=r"--into own\.py:make;"):
        rebuild(entry_description(called))
    low_rank = through_json(run_entry(convert(net, "lr")))
    assert (low_rank["name"], low_rank["base"], low_rank["class"]) == ("own.py:net+lr", "own.py:net", "Sequential")


def test_a_config_of_another_library_is_not_taken_for_ours():
    net = own()
    net.config = {"name": "nin", "hidden": object()}
    assert run_entry(net) == {"name": "Sequential", "class": "Sequential"}
    assert rebuild_options(net)["model"] is None


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ({"model": {"name": "nim"}}, "no network 'nim'"),
        ({"model": {"name": "nin", "code": "import os"}}, "stored options of nin"),
        ({"model": {"name": "nin"}, "conversion": []}, "lists the layers"),
        ({"model": {"name": "nin"}, "conversion": {"changed": [3]}}, "lists the layers"),
        ({"model": {"name": "nin"}, "conversion": {"changed": [{"name": "x", "scheme": "lr"}]}}, "no layer x"),
        (
            {"model": {"name": "nin"}, "conversion": {"changed": [{"name": "features.conv1_1", "scheme": "x"}]}},
            "no scheme 'x'",
        ),
    ],
)
def test_damaged_descriptions_are_refused_in_a_sentence(description: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        rebuild(description)


@pytest.mark.parametrize("name", ["nin-c3-lr", "vgg11-gmp-lr", "googlenet-lr"])
def test_a_network_for_other_classes_keeps_all_but_its_last_layers(name: str):
    network = create_model(name, num_classes=7, width=0.05, norm="batch")
    fewer = with_classes(network, 3)
    assert fewer.config == {**network.config, "num_classes": 3}
    before, after = network.state_dict(), fewer.state_dict()
    changed = [key for key, tensor in after.items() if not torch.equal(tensor, before[key])]
    assert changed
    assert all(before[key].shape[0] == 7 and after[key].shape[0] == 3 for key in changed)


def test_other_classes_of_the_same_number_get_a_new_last_layer():
    network = create_model("nin-c3-lr", num_classes=3, width=0.05)
    for classes in (3, 2):
        before, after = network.state_dict(), with_classes(network, classes).state_dict()
        changed = [key for key, tensor in after.items() if not torch.equal(tensor, before[key])]
        assert changed
        assert all(after[key].shape[0] == classes for key in changed)


def test_a_foreign_network_has_no_other_classes():
    with pytest.raises(LowRankError, match="not one of our networks"):
        with_classes(nn.Linear(2, 2), 3)
