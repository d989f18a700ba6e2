import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.core.cache import JsonCache
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.block_forms import CANDIDATES, ByGroup, groups_apart
from lowrank_cnn.deploy.blocks import Block, BlockAsGiven, Epilogue, in_blocks
from lowrank_cnn.deploy.plan import Cache, plan
from lowrank_cnn.kernels.problem import activate
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv
from lowrank_cnn.models import create_model


class Slow(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = BlockAsGiven(block.layer, block.epilogue)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            y = self.block(*inputs)
        return y


SLOW = {"as given": Slow, "quick": CANDIDATES["as given"]}
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
    st.sampled_from([None, "relu", "leaky_relu", "silu", "gelu", "hardswish"]),
    st.sampled_from([None, nn.MaxPool2d(2), nn.MaxPool2d(3, 2, ceil_mode=True)]),
    st.booleans(),
)
def test_every_way_gives_what_the_block_gives(
    scheme: str, options: dict, activation: str | None, pool, adds: bool
):
    channels = 4 if options else 32  # as many as minimal filtering takes
    layer = build_conv(channels, 8, 3, scheme, **options).double().eval()
    block = Block("", layer, Epilogue(activation, pool, adds))
    x = torch.randn(2, channels, 12, 11, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
        inputs = (x, torch.randn_like(y)) if adds else (x,)
        expected = y + inputs[1] if adds else y
        expected = activate(expected, activation)
        expected = pool(expected) if pool else expected
        for make in CANDIDATES.values():
            way = make(block)
            if way is not None:
                torch.testing.assert_close(way.eval()(*inputs), expected, rtol=0, atol=1e-10)


def test_groups_can_be_rectified_and_pooled_before_they_are_concatenated(image: torch.Tensor):
    net = create_model("vgg11-gmp-lr", width=0.05).double().eval()
    apart = groups_apart(net)
    assert isinstance(apart.features.conv1_1.last, ByGroup)
    assert not hasattr(apart.features, "pool1")
    torch.testing.assert_close(apart(image.double()), net(image.double()), rtol=0, atol=1e-12)
    dense = create_model("vgg11-gmp", width=0.05).eval()
    assert str(groups_apart(dense)) == str(dense)


def test_a_plan_keeps_the_outputs_and_the_callers_network(network: nn.Module, image: torch.Tensor):
    before, text = copy.deepcopy(network.state_dict()), str(network)
    planned = plan(network, image, cache=False, repeats=3)
    torch.testing.assert_close(planned(image), network(image), rtol=1e-4, atol=1e-5)
    assert str(network) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert [row.name for row in notes(planned).plan.decisions] == [
        block.name for block in in_blocks(network, image)[1]
    ]
    first = notes(planned).plan.decisions[0]
    assert first.macs == 2 * 900 * 3 * 3 * network.features.conv1_1.out_channels
    assert set(first.times) - {"compiled strips"} == {"as given", "by group", "merged", "matrix products"}
    assert json.loads(json.dumps(notes(planned).plan.to_dict()))["input"] == [2, 3, 30, 30]
    head, *rows, whole = str(notes(planned).plan).splitlines()
    assert head.split()[:2] + head.split()[-1:] == ["block", "MACs", "chosen"]
    assert [row.split()[0] for row in rows] == [row.name for row in notes(planned).plan.decisions]
    assert whole.startswith("whole network: ")


def test_what_was_given_is_returned_where_nothing_is_gained(network: nn.Module, image: torch.Tensor):
    planned = plan(network, image, cache=False, repeats=3, candidates=WORSE)
    assert not notes(planned).plan.used
    assert {row.choice for row in notes(planned).plan.decisions} == {"as given"}
    assert str(planned) == str(network)


def kept(path: Path) -> JsonCache:
    """The times in a file."""
    return Cache.open(path).entries


def test_the_second_plan_makes_only_what_the_first_one_chose(network: nn.Module, image: torch.Tensor, tmp_path):
    made: list[str] = []

    def noted(name: str, make):
        return lambda block: made.append(name) or make(block)

    ways = {name: noted(name, make) for name, make in {**SLOW, "as slow": SLOW["as given"]}.items()}
    first = plan(network, image, cache=tmp_path / "plans.json", repeats=3, candidates=ways)
    made.clear()
    again = plan(network, image, cache=tmp_path / "plans.json", repeats=3, candidates=ways)
    assert {row.choice for row in (*notes(first).plan.decisions, *notes(again).plan.decisions)} == {"quick"}
    blocks = len(notes(again).plan.decisions)
    assert made[: 2 * blocks] == ["as given", "quick"] * blocks  # then it may plan anew, if nothing is gained


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
        (lambda net, x: plan(net, (3, 30, 30)), "a tensor, not int"),
        (lambda net, x: plan(net, x.double()), "does not run on an input of 2x3x30x30, float64"),
        (lambda net, x: plan(net, x[:0]), "input of 0x3x30x30 is empty"),
        (lambda net, x: plan(net, x.to("meta")), "nothing takes time"),
        (lambda net, x: plan(nn.Conv2d(5, 4, 3).eval(), x), "does not run on an input of 2x3x30x30, float32"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, says: str, network: nn.Module, image: torch.Tensor):
    with pytest.raises(LowRankError, match=says):
        call(network, image)


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


def test_a_network_that_cannot_be_captured_is_left_alone_and_says_so(image: torch.Tensor):
    net = Walks().eval()
    planned = plan(net, image, cache=False, repeats=3)
    assert torch.equal(planned(image), net(image))
    found = notes(planned).plan
    assert not found.used
    assert "cannot be traced" in found.reason
    assert str(found).startswith("not planned: ")


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_hooks_are_kept(hook: str, place: int, image: torch.Tensor):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    called = []
    getattr(net[place], hook)(lambda *_: called.append(1))
    planned = plan(net, image, cache=False, repeats=3, candidates=SLOW)
    called.clear()
    planned(image.requires_grad_()).sum().backward()
    assert called


class Residual(nn.Module):
    """A block written by hand: functions, a module used twice, and a sum in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (build_conv(channels, channels, 3, "lr") for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv2(self.relu(self.conv1(x)))
        y += x
        return self.relu(y)


def test_residual_blocks_are_planned(image: torch.Tensor):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), Residual(16)).eval()
    planned = plan(net, image, cache=False, repeats=3, candidates=SLOW)
    torch.testing.assert_close(planned(image), net(image), rtol=1e-4, atol=1e-5)
    epilogues = [row.epilogue for row in notes(planned).plan.decisions]
    assert epilogues[1:3] == ["relu", "add + relu"]


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 3, 16), (1, 3, 8, 8, 8)])
def test_inputs_of_other_dimensions_are_planned_or_left_alone(shape: tuple[int, ...]):
    kinds = {2: nn.Conv1d, 3: nn.Conv2d, 5: nn.Conv3d}
    kind = nn.Conv1d if shape == (2, 3, 16) else kinds[len(shape)]
    net = nn.Sequential(kind(3, 32, 3, padding=1), nn.ReLU(), kind(32, 32, 3, padding=1)).eval()
    x = torch.randn(shape)
    planned = plan(net, x, cache=False, repeats=3)
    torch.testing.assert_close(planned(x), net(x), rtol=1e-4, atol=1e-5)


def test_nan_is_refused(image: torch.Tensor):
    net = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    nn.init.constant_(net[0].bias, float("nan"))
    with pytest.raises(LowRankError, match="NaN or infinite"):
        plan(net, image, cache=False)
