"""`lr.plan` measures the ways of each block, keeps the fastest that is right, and remembers what it measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.clock import Sample
from lowrank_cnn.deploy import plan as planning
from lowrank_cnn.deploy.blocks import CANDIDATES, Block, BlockAsGiven, Epilogue
from lowrank_cnn.deploy.plan import NetworkPlan, block_key, network_key, open_times
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv
from lowrank_cnn.models import create_model

AS_GIVEN = CANDIDATES["as given"]
MS = {
    "as given": 2.0,
    "quick": 1.0,
    "hardly quicker": 1.95,
    "wrong": 0.1,
    "reordered": 0.1,
    "slow": 5.0,
    "planned": 1.5,
}
IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Every candidate takes the time that this table says."""
    table = dict(MS)

    def measured(runs, **_) -> dict[str, Sample]:
        return {name: Sample(table[name], table[name], table[name], 3) for name in runs}

    monkeypatch.setattr(planning, "measure", measured)
    return table


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("nin-c3-lr", width=0.05).eval()


def two_alike() -> nn.Module:
    """Two blocks that differ in nothing but their place."""
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU()).eval()


def planned(net: nn.Module, x: torch.Tensor = IMAGE, cache=False, **candidates) -> tuple[nn.Module, NetworkPlan]:
    """A network planned among these candidates, or all, and its plan."""
    ways = {"as given": AS_GIVEN, **{name.replace("_", " "): make for name, make in candidates.items()}}
    made = lr.plan(net, x, cache=cache, candidates=ways if candidates else CANDIDATES, repeats=3)
    found = lr.notes(made).plan
    torch.testing.assert_close(made(x), net(x), rtol=1e-4, atol=1e-5)
    return made, found


def test_the_fastest_way_replaces_each_block(known_times):
    quick: list[nn.Module] = []
    made, found = planned(two_alike(), quick=lambda block: quick.append(AS_GIVEN(block)) or quick[-1])
    assert [row.choice for row in found.decisions] == ["quick", "quick"]
    assert [made.get_submodule(row.name) for row in found.decisions] == quick
    assert [row.macs for row in found.decisions] == [2 * 900 * 9] * 2
    assert found.used
    assert "2.000 ms before, 1.500 after; the plan is used" in str(found)
    known_times["planned"] = 3.0
    made, found = planned(two_alike(), quick=AS_GIVEN)
    assert not found.used, "the whole network gains nothing"
    assert "nothing gained: as given" in str(found)
    assert str(made) == str(two_alike())


@pytest.mark.parametrize("way", ["hardly_quicker", "slow"])
def test_a_gain_within_noise_changes_nothing(known_times, way: str):
    made, found = planned(two_alike(), **{way: AS_GIVEN})
    assert {row.choice for row in found.decisions} == {"as given"}
    assert not found.used
    assert str(made) == str(two_alike())


def test_wrong_and_broken_ways_are_left_out_with_the_reason_in_blocks_that_are_alike(known_times):
    wrong = lambda block: BlockAsGiven(block.layer, Epilogue("silu"))  # noqa: E731
    _, found = planned(two_alike(), quick=AS_GIVEN, wrong=wrong, broken=lambda block: nn.Flatten(start_dim=7))
    for row in found.decisions:
        assert set(row.times) == {"as given", "quick"}
        assert row.failed["wrong"] == "another result"
        assert f"{row.name}, wrong: another result" in str(found)
        assert "Dimension out of range" in row.failed["broken"]


class Reordered(BlockAsGiven):
    def __init__(self, block: Block) -> None:
        super().__init__(block.layer, block.epilogue)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).contiguous(memory_format=torch.channels_last)


class Drifts(Reordered):
    """Agrees on the tensors that the block was planned on, and gives something else afterwards."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return BlockAsGiven.forward(self, x) * (1 if self.calls <= 2 else 2)


def test_a_way_that_stops_or_changes_the_rest_of_the_network_is_refused(known_times, views: nn.Module):
    (row,) = planned(views, reordered=Reordered)[1].decisions
    assert row.choice == "as given"
    assert "memory format" in row.failed["reordered"]
    _, found = planned(two_alike(), quick=Drifts)
    assert {row.choice for row in found.decisions} == {"as given"}
    assert all("would differ" in row.failed["quick"] for row in found.decisions)


def test_a_plan_keeps_the_outputs_and_the_callers_network(network: nn.Module):
    before, text = copy.deepcopy(network.state_dict()), str(network)
    _, found = planned(network)
    assert str(network) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    first = found.decisions[0]
    assert first.macs == 2 * 900 * 3 * 3 * network.features.conv1_1.out_channels
    assert set(first.times) - {"compiled strips"} == {"as given", "by group", "merged"}
    assert json.loads(json.dumps(found.to_dict()))["input"] == [2, 3, 30, 30]
    head, *rows, whole = str(found).splitlines()
    assert head.split()[:2] + head.split()[-1:] == ["block", "MACs", "chosen"]
    assert [row.split()[0] for row in rows] == [row.name for row in found.decisions]
    assert whole.startswith("whole network: ")


def test_times_are_kept_and_the_second_plan_makes_only_what_the_first_one_chose(known_times, tmp_path: Path):
    made, path = [], tmp_path / "deep" / "plans.json"

    def noted(name: str):
        return lambda block: made.append(name) or AS_GIVEN(block)

    ways = {"as_given": noted("as given"), "quick": noted("quick"), "slow": noted("slow")}
    _, first = planned(two_alike(), cache=path, **ways)
    stored = open_times(path).entries
    made.clear()
    _, again = planned(two_alike(), cache=path, **ways)
    assert made == ["as given", "quick"] * 2
    assert [row.times for row in again.decisions] == [row.times for row in first.decisions]
    assert open_times(path).entries == stored
    planned(two_alike(), IMAGE[:1], cache=path, **ways)
    assert len(open_times(path).entries) > len(stored)


def test_times_that_the_whole_network_belies_are_measured_anew(known_times, tmp_path: Path):
    path = tmp_path / "plans.json"
    planned(two_alike(), cache=path, slow=AS_GIVEN)
    busy = open_times(path)
    for key in list(busy.entries):
        busy[key] = {"as given": 9.0, "slow": 0.1}
    busy.save()
    known_times["planned"] = 3.0
    _, again = planned(two_alike(), cache=path, slow=AS_GIVEN)
    assert {row.choice for row in again.decisions} == {"as given"}
    assert all(times["slow"] > times["as given"] for times in open_times(path).entries.values())


def test_a_plan_is_not_lost_with_a_cache_that_cannot_be_written(network: nn.Module, tmp_path: Path):
    (tmp_path / "file").touch()
    said: list[str] = []
    made = lr.plan(network, IMAGE, cache=tmp_path / "file" / "plans.json", repeats=3, say=said.append)
    assert lr.notes(made).plan.decisions
    assert "could not be kept" in said[-1]


def test_times_are_found_again_by_everything_that_they_depend_on_and_nothing_else(monkeypatch):
    x, conv = IMAGE[:1], nn.Conv2d(3, 8, 3)
    keys = [
        block_key(Block("a", conv), [x]),
        block_key(Block("a", conv, Epilogue("relu")), [x]),
        block_key(Block("a", nn.Conv2d(3, 8, 5)), [x]),
        block_key(Block("a", conv), [x.contiguous(memory_format=torch.channels_last)]),
        block_key(Block("a", conv), [x.double()]),
        block_key(Block("a", conv), [x, x]),
        network_key(conv, x),
        network_key(conv, x, True),
    ]
    assert block_key(Block("b", nn.Conv2d(3, 8, 3)), [x + 1]) == keys[0]
    for version in ("0.1.0", "0.2.0"):  # of compiled strips
        monkeypatch.setattr(planning, "installed_version", lambda found=f"{version} other": found)
        planning._machine.cache_clear()
        keys.append(block_key(Block("a", conv), [x]))
    planning._machine.cache_clear()
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net, x: lr.plan(net.train(), x), "inference"),
        (lambda net, x: lr.plan("net", x), "an nn.Module, not str"),
        (lambda net, x: lr.plan(net, (3, 30, 30)), "a tensor, not int"),
        (lambda net, x: lr.plan(net, x.double()), "does not run on an input of 2x3x30x30, float64"),
        (lambda net, x: lr.plan(net, x[:0]), "input of 0x3x30x30 is empty"),
        (lambda net, x: lr.plan(net, x.to("meta")), "cannot time meta tensors"),
        (lambda net, x: lr.plan(nn.Conv2d(5, 4, 3).eval(), x), "does not run on an input of 2x3x30x30, float32"),
        (lambda net, x: lr.plan(net, x * float("nan")), "NaN or infinite"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, says: str, network: nn.Module):
    with pytest.raises(lr.LowRankError, match=says):
        call(network, IMAGE)


class Walks(nn.Module):
    """Walks its own layers, in a way that depends on values, as perceptual losses do."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.features:
            x = layer(x)
            seen.append(x.mean((2, 3)) if x.mean() > -1e9 else x)
        return torch.cat(seen, dim=1)


def test_a_network_that_cannot_be_captured_is_left_alone_and_says_so():
    _, found = planned(Walks().eval())
    assert not found.used
    assert "cannot be traced" in found.reason
    assert str(found).startswith("not planned: ")


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_hooks_are_kept(known_times, hook: str, place: int):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    called = []
    getattr(net[place], hook)(lambda *_: called.append(1))
    made, _ = planned(net, quick=AS_GIVEN)
    called.clear()
    made(IMAGE.clone().requires_grad_()).sum().backward()
    assert called


def test_residual_blocks_and_networks_of_one_layer_are_planned(known_times, residual: nn.Module):
    _, found = planned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), residual).eval(), quick=AS_GIVEN)
    assert [row.epilogue for row in found.decisions] == ["relu", "add + relu"]
    chain = build_conv(3, 8, 3, "lr-join").eval()
    assert isinstance(chain, FactoredConv2d)
    assert planned(chain, quick=AS_GIVEN)[1].used
