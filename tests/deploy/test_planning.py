import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.deploy.blocks import Block, find_blocks
from lowrank_cnn.deploy.candidates import CANDIDATES, Apart, groups_apart
from lowrank_cnn.deploy.plan_cache import Cache
from lowrank_cnn.deploy.planning import _with_neighbours, plan
from lowrank_cnn.method.layers import FactoredConv2d, build_conv
from lowrank_cnn.models import create_model
from lowrank_cnn.system.cache import JsonCache
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes


class Slow(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = nn.Sequential(*block.modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            y = self.block(x)
        return y


SLOW = {"as given": Slow, "quick": lambda block: nn.Sequential(*block.modules)}
WORSE = {"as given": CANDIDATES["as given"], "slow": Slow}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("nin-c3-lr", width=0.05).eval()


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


@settings(max_examples=40)
@given(
    st.sampled_from(["dense", "lr", "lr-join", "separable", "mixture(kx1, kxk, join)"]),
    st.sampled_from([{}, {"stride": 2}, {"padding": 0}, {"channel_groups": 2}, {"padding_mode": "circular"}]),
    st.booleans(),
    st.sampled_from([None, nn.MaxPool2d(2), nn.MaxPool2d(3, 2, ceil_mode=True)]),
)
def test_every_way_gives_what_the_block_gives(scheme: str, options: dict, relu: bool, pool):
    layer = build_conv(4, 8, 3, scheme, **options).double().eval()
    block = Block("", layer, relu, pool)
    x = torch.randn(2, 4, 12, 11, dtype=torch.float64)
    with torch.no_grad():
        expected = nn.Sequential(*block.modules)(x)
        for make in CANDIDATES.values():
            way = make(block)
            if way is not None:
                torch.testing.assert_close(way.eval()(x), expected, rtol=0, atol=1e-10)


def test_groups_can_be_rectified_and_pooled_before_they_are_concatenated(image: torch.Tensor):
    net = create_model("vgg11-gmp-lr", width=0.05).double().eval()
    apart = groups_apart(net)
    assert isinstance(apart.features.conv1_1[0], Apart)
    assert isinstance(apart.features.pool1, nn.Identity)
    torch.testing.assert_close(apart(image.double()), net(image.double()), rtol=0, atol=1e-12)
    dense = create_model("vgg11-gmp", width=0.05).eval()
    assert str(groups_apart(dense)) == str(dense)


def test_a_plan_keeps_the_outputs_and_the_callers_network(network: nn.Module, image: torch.Tensor):
    before, text = copy.deepcopy(network.state_dict()), str(network)
    planned = plan(network, image, cache=False, repeats=3)
    torch.testing.assert_close(planned(image), network(image), rtol=1e-4, atol=1e-5)
    assert str(network) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert [row.name for row in notes(planned).plan.decisions] == [block.name for block in find_blocks(network)]
    first = notes(planned).plan.decisions[0]
    assert first.macs == 2 * 900 * 3 * 3 * network.features.conv1_1.out_channels
    assert set(first.times) == {"as given", "by group", "merged", "matrix products"}
    assert json.loads(json.dumps(notes(planned).plan.to_dict()))["input"] == [2, 3, 30, 30]
    head, *rows, whole = str(notes(planned).plan).splitlines()
    assert head.split()[:2] + head.split()[-1:] == ["block", "MACs", "chosen"]
    assert [row.split()[0] for row in rows] == [row.name for row in notes(planned).plan.decisions]
    assert whole.startswith("whole network: ")


def test_the_fastest_way_is_chosen(network: nn.Module, image: torch.Tensor):
    slow = plan(network, image, cache=False, repeats=3, candidates=SLOW)
    assert {row.choice for row in notes(slow).plan.decisions} == {"quick"}


def test_what_was_given_is_returned_where_nothing_is_gained(network: nn.Module, image: torch.Tensor):
    planned = plan(network, image, cache=False, repeats=3, candidates=WORSE)
    assert not notes(planned).plan.used
    assert {row.choice for row in notes(planned).plan.decisions} == {"as given"}
    assert str(planned) == str(network)


def test_a_way_that_gives_something_else_is_not_chosen(network: nn.Module, image: torch.Tensor):
    wrong = {**SLOW, "wrong": lambda block: nn.Sequential(*block.modules, nn.Softplus())}
    planned = plan(network, image, cache=False, repeats=3, candidates=wrong)
    assert all("wrong" not in row.times for row in notes(planned).plan.decisions)


def kept(path: Path) -> JsonCache:
    """The times in a file."""
    return Cache.open(path).entries


def test_times_are_kept_and_found_again(network: nn.Module, image: torch.Tensor, tmp_path):
    path = tmp_path / "deep" / "plans.json"
    alone = {"as given": CANDIDATES["as given"]}
    first = plan(network, image, cache=path, repeats=3, candidates=alone)
    stored = kept(path).entries
    again = plan(network, image, cache=path, repeats=3, candidates=alone)
    assert kept(path).entries == stored
    assert [dict(row.times) for row in notes(again).plan.decisions] == [
        dict(row.times) for row in notes(first).plan.decisions
    ]
    plan(network, image[:1], cache=path, repeats=3)
    assert len(kept(path).entries) > len(stored)


def test_times_that_the_whole_network_belies_are_measured_anew(network: nn.Module, image: torch.Tensor, tmp_path):
    path = tmp_path / "plans.json"
    plan(network, image, cache=path, repeats=3, candidates=WORSE)
    busy = kept(path)
    for key in list(busy.entries):
        busy[key] = {"as given": 9.0, "slow": 0.1}
    busy.save()
    again = plan(network, image, cache=path, repeats=3, candidates=WORSE)
    assert not notes(again).plan.used
    assert all(row.choice == "as given" for row in notes(again).plan.decisions)
    assert all(times["slow"] > times["as given"] for times in kept(path).entries.values())


def test_a_damaged_cache_counts_as_empty(network: nn.Module, image: torch.Tensor, tmp_path):
    path = tmp_path / "plans.json"
    path.write_bytes(b"\xff{not json")
    plan(network, image, cache=path, repeats=3)
    assert kept(path).entries


def test_a_plan_is_not_lost_with_a_cache_that_cannot_be_written(network: nn.Module, image: torch.Tensor, tmp_path):
    (tmp_path / "file").touch()
    said: list[str] = []
    planned = plan(network, image, cache=tmp_path / "file" / "plans.json", repeats=3, say=said.append)
    assert notes(planned).plan.decisions
    assert "could not be kept" in said[-1]


def test_a_network_of_one_layer_is_planned_too(image: torch.Tensor):
    chain = build_conv(3, 8, 3, "lr-join").eval()
    assert isinstance(chain, FactoredConv2d)
    planned = plan(chain, image, cache=False, repeats=3)
    torch.testing.assert_close(planned(image), chain(image))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net, x: plan(net.train(), x), "inference"),
        (lambda net, x: plan("net", x), "an nn.Module, not str"),
        (lambda net, x: plan(net, (3, 30, 30)), "a tensor, not tuple"),
        (lambda net, x: plan(net, x.double()), "does not run on an input of 2x3x30x30, float64"),
        (lambda net, x: plan(net, x[:0]), "input of 0x3x30x30 is empty"),
        (lambda net, x: plan(net, x.to("meta")), "nothing takes time"),
        (lambda net, x: plan(nn.Conv2d(5, 4, 3).eval(), x), "does not run on an input of 2x3x30x30, float32"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, says: str, network: nn.Module, image: torch.Tensor):
    with pytest.raises(LowRankError, match=says):
        call(network, image)


class Asking(nn.Module):
    """Treats pools in a way of its own, as forwards written by hand do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "size":
            return x[..., : self.layers[1].kernel_size]
        for layer in self.layers:
            x = layer(x)
            x = 2 * x if self.how == "kind" and isinstance(layer, nn.MaxPool2d) else x
        return x


def test_neighbours_are_fused_where_the_network_stays_the_same(image: torch.Tensor):
    with torch.no_grad():
        twin = _with_neighbours(Asking("").eval(), image)
        assert twin is not None
        assert type(twin.layers[1]).__name__ == "FusedPool"
        assert _with_neighbours(Asking("kind").eval(), image) is None
        assert _with_neighbours(Asking("size").eval(), image) is None
        assert _with_neighbours(nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), image) is None
