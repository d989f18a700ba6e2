"""A network is built again from its description, for other classes, or dense; nothing stored is run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.models.build import (
    baseline_of,
    dense_cost,
    dense_twin,
    entry_description,
    rebuild,
    run_entry,
    with_classes,
)


def through_json(value):
    return json.loads(json.dumps(value))


def own() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def converted() -> nn.Module:
    net = convert(create_model("nin", width=0.1), "lr", where="*conv1*")
    return decompose(net, "separable", macs=0.6, input_size=(3, 16, 16))


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
    with pytest.raises(LowRankError, match="build the unconverted network and call"):
        rebuild(entry_description(called))
    low_rank = through_json(run_entry(convert(net, "lr")))
    assert (low_rank["name"], low_rank["base"], low_rank["class"]) == ("own.py:net+lr", "own.py:net", "Sequential")


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


@pytest.mark.parametrize("classes", [3, 7])
@pytest.mark.parametrize("name", ["nin-c3-lr", "vgg11-gmp-lr", "googlenet-lr"])
def test_a_network_for_other_classes_keeps_all_but_its_last_layers(name: str, classes: int):
    network = create_model(name, num_classes=7, width=0.05, norm="batch")
    other = with_classes(network, classes)
    assert other.config == {**network.config, "num_classes": classes}
    before, after = network.state_dict(), other.state_dict()
    changed = [key for key, tensor in after.items() if not torch.equal(tensor, before[key])]
    assert changed
    assert all(before[key].shape[0] == 7 and after[key].shape[0] == classes for key in changed)


def test_a_foreign_network_has_no_other_classes():
    with pytest.raises(LowRankError, match="not one of our networks"):
        with_classes(nn.Linear(2, 2), 3)


SIZE = (3, 32, 48)


class Odd(nn.Module):
    """Strides, channel groups, a conv without bias, and one that runs twice on maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 5, stride=2, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.last = nn.Conv2d(8, 6, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.wide(x))
        return self.last(self.twice(nn.functional.max_pool2d(x, 2)))


def cost(model: nn.Module) -> tuple[int, int]:
    counted = lr.count(model, SIZE)
    return counted.macs, counted.params


SCHEMES = ["lr", "lr-join(m=3)", "separable(m=4)", "mixture(kx1, 1xk, kxk, join)", "lr(5x1, 1x5)"]
SCHEMES += ["lr(branches)", "lr-join(m=3, branches)", "mixture(kx1=3, 1xk=3, kxk=2, branches)"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_converted_network_knows_what_it_cost_before(scheme: str):
    dense = Odd()
    converted = convert(dense, scheme)
    assert cost(converted)[0] != cost(dense)[0]
    assert dense_cost(converted, SIZE) == cost(dense)
    in_steps = convert(convert(dense, scheme, where="wide"), "lr", where="last")
    assert dense_cost(in_steps, SIZE) == cost(dense)


@pytest.mark.parametrize("scheme", ["lr", "lr-join", "lr(branches)", "dense(branches)"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_network_that_is_one_conv(scheme: str, bias: bool):
    conv = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
    assert dense_cost(convert(conv, scheme), SIZE) == cost(conv)


def test_the_dense_cost_of_other_networks():
    assert dense_cost(Odd(), SIZE) == cost(Odd())  # never converted
    merged = lr.merge(convert(nn.Sequential(nn.Conv2d(3, 8, 3)), "lr-join").eval(), chains=True)
    assert dense_cost(merged, SIZE) == cost(nn.Conv2d(3, 8, 3))
    by_hand = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)]), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert dense_cost(by_hand, SIZE) is None  # what the composite replaced is unknown
    assert dense_cost(convert(by_hand, "lr"), SIZE) is None


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("vgg11-gmp-lr-join-wfull", "vgg11-gmp"),
        ("vgg11-gmp-lr-2x", "vgg11-gmp"),
        ("googlenet-lr-conv1", "googlenet"),
        ("nin-c3-lr", "nin"),
        ("resnet18-lr-late", "resnet18"),
        ("resnet18-small-lr", "resnet18-small"),
        ("airbench-lr", "airbench"),
    ],
)
def test_a_networks_twin_is_its_familys_dense_baseline(name: str, twin: str):
    net = create_model(name, width=0.05, norm="batch", num_classes=7)
    found = dense_twin(net)
    assert found.config == {**net.config, "name": twin}


def test_dense_networks_have_no_twin_and_converted_ones_do():
    dense = [name for name in list_models() if dense_twin(create_model(name, width=0.05)) is None]
    paper = ["vgg11", "vgg11-gmp", "googlenet", "nin"]
    assert dense == [*paper, "resnet18", "resnet18-small", "airbench", "convnext", "convnext-small"]
    assert dense_twin(nn.Conv2d(3, 4, 3)) is None
    converted = convert(create_model("nin", width=0.05), "lr")
    assert dense_twin(converted).config == converted.config
    assert dense_twin(create_model("nin", width=0.05, scheme="lr")).config["scheme"] is None
    assert [baseline_of(name) for name in ("nin-c3", "ninety", "vgg11-gmp-lr")] == ["nin", "ninety", "vgg11-gmp"]
