from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.choose.candidates import (
    CANDIDATES,
    FAMILIES,
    Builder,
    Design,
    at_width,
    find_design,
    width_of_macs,
)
from lowrank_cnn.choose.trace import FrontierPlan
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.count import count
from lowrank_cnn.method.init import init_
from lowrank_cnn.models import create_model
from lowrank_cnn.models.airbench import PatchConv2d

SMALL = Builder.of_family(FAMILIES["airbench"], (1, 12, 12), 5, base=0.25)
DEPTHWISE = Builder.of_family(FAMILIES["convnext"], (1, 16, 16), 5, base=0.25)


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_can_be_built_counted_and_run(name: str):
    design = CANDIDATES[name]
    builder = DEPTHWISE if design.scheme == "bands" else SMALL
    network = builder(design)
    assert network(torch.randn(2, *builder.size)).shape == (2, 5)
    assert builder.count(design).macs != builder.count(Design("dense")).macs
    assert any(isinstance(m, PatchConv2d) for m in network.modules()) == (builder is SMALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_design_can_be_counted_in_every_family(family: str):
    builder = Builder.of_family(FAMILIES[family], (3, 32, 32), 10, base=0.5)
    dense = builder.count(Design("dense")).macs
    assert builder.count(Design("h", width=0.5)).macs < 0.45 * dense
    assert builder.count(find_design("lr")).macs < (0.95 if family == "convnext" else 0.8) * dense
    for name in (
        ("bands", "dense-3x3") if family == "convnext" else ("wfull-2x", "separable-relu", "lr-late-branches")
    ):
        design = find_design(name)
        assert builder.count(design).macs < dense or design.last > 1 or design.dense


def test_the_width_of_conv5_is_a_control():
    builder = Builder.of_family(FAMILIES["vgg11"], (3, 32, 32), 100)
    with torch.device("meta"):
        nets = {name: builder(find_design(name)) for name in ("wfull", "wfull-2x", "dense-2x", "lr-2x@0.5")}
        published = create_model("vgg11-gmp-lr-join-wfull", num_classes=100, norm="batch")
    filters = {name: net.get_submodule("features.conv5_2").out_channels for name, net in nets.items()}
    assert filters == {"wfull": 512, "wfull-2x": 1024, "dense-2x": 1024, "lr-2x@0.5": 512}
    assert {net.get_submodule("features.conv4_2").out_channels for net in nets.values()} == {512, 256}
    assert builder.count(find_design("wfull-2x")).params == pytest.approx(
        count(published, (3, 32, 32)).params, rel=1e-3
    )


def test_branches_cost_nothing_and_a_rectified_pair_has_a_norm_and_a_relu_between():
    assert SMALL.count(CANDIDATES["lr-branches"]).macs == SMALL.count(CANDIDATES["lr"]).macs
    pair = SMALL(CANDIDATES["separable-relu"]).get_submodule("features.conv1_2")
    assert [type(m) for m in pair] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]


def test_designs_are_found_by_name_by_scheme_and_with_a_width():
    assert find_design("lr") is CANDIDATES["lr"]
    assert find_design("strips5@0.5").width == 0.5
    assert find_design("mixture(kx1, 1x1)@2").scheme == "mixture(kx1, 1x1)"
    assert at_width(find_design("lr@2"), 1.0).name == "lr"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lrr", "neither a design nor a scheme"),
        ("lr@wide", "width is a number"),
        ("lr@9", "up to 4"),
        ("dense/features.conv2_1=half", "a width is a number"),
    ],
)
def test_a_text_that_is_no_design_is_refused(text: str, sentence: str):
    with pytest.raises(LowRankError, match=sentence):
        find_design(text)
    with pytest.raises(LowRankError, match=sentence):
        FrontierPlan(teacher=text)


def test_a_width_is_found_at_which_a_design_costs_as_much():
    dense = SMALL.count(Design("dense")).macs
    width = width_of_macs(SMALL, CANDIDATES["lr"], dense)
    assert 1.3 < width < 2.5
    assert SMALL.count(at_width(CANDIDATES["lr"], width)).macs == pytest.approx(dense, rel=0.2)


def test_a_rival_can_have_3x3_filters_or_layers_with_widths_of_their_own():
    builder = Builder.of_family(FAMILIES["nin"], (3, 32, 32), 10)
    small, own = find_design("dense-3x3"), builder(find_design("dense-32s/features.conv2_1=0.5"))
    dense = builder.count(Design("dense"))
    saved = 16 * (3 * 192 * 32**2 + 96 * 192 * 16**2)  # 16 of 25 taps in the first two convs
    assert small.dense
    assert builder.count(small).macs == dense.macs - saved
    assert own.get_submodule("features.conv2_1").out_channels == 96
    assert own.get_submodule("features.conv3_1").out_channels == 192
    large = find_design("mixture(7x7)@0.5")
    convs = [m for m in builder(large).modules() if isinstance(m, nn.Conv2d)]
    assert large.dense
    assert {conv.kernel_size for conv in convs} == {(1, 1), (7, 7)}
    assert not find_design("mixture(7x1, 1x7)").dense


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"match": ("size",)}, "macs or time"),
        ({"seeds": -1}, "seeds must be a whole number of at least 0"),
        ({"processes": 0}, "processes must be a whole number of at least 1"),
        ({"rates": (0.0,)}, "a factor of the learning rate must be a number above 0"),
        *(({"budget": s}, "budget, in seconds, must be a number above 0") for s in (-1.0, 0.0, float("nan"))),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict, sentence: str):
    with pytest.raises(LowRankError, match=sentence):
        FrontierPlan(**wrong)


def test_without_a_clock_nothing_is_matched_by_time():
    assert FrontierPlan(batch=0).match == ("macs",)


@pytest.mark.parametrize(("name", "stages"), [("dense@0.5", 1), ("lr", 1), ("separable", 2)])
def test_all_begin_as_the_users_own_network_is_initialised(name: str, stages: int):
    """Torch's default is smaller than He's, by which a candidate would train as at another learning rate."""
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 96, 3, padding=1)
    network: Any = Builder(lambda: nn.Sequential(nn.Conv2d(3, 64, 3), layer), (3, 8, 8))(find_design(name))
    begun = torch.cat([value.flatten() for value in network[1].parameters() if value.dim() > 1]).std()
    init_(network)
    usual = torch.cat([value.flatten() for value in network[1].parameters() if value.dim() > 1]).std()
    default = layer.weight.std() / init_(layer).weight.std()  # type: ignore[operator]
    assert ((begun / usual) ** stages).item() == pytest.approx(default.item(), rel=0.1)
    assert default < 0.8


@pytest.mark.parametrize("name", ["dense", "dense@0.5", "lr"])
def test_a_design_is_counted_as_it_is_built(name: str):
    def tied() -> nn.Module:
        first, second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        second.weight = first.weight
        return nn.Sequential(nn.Conv2d(3, 64, 3), first, nn.ReLU(), second, nn.Flatten(), nn.Linear(64 * 36, 10))

    built = Builder(tied, (3, 8, 8))
    assert built.count(find_design(name)) == count(built(find_design(name)), (3, 8, 8))


def test_a_network_of_any_initialisation_has_candidates():
    first, zero, twice = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
    nn.init.zeros_(zero.weight)
    built = Builder(lambda: nn.Sequential(first, zero, twice, nn.ReLU(), twice, nn.Conv2d(32, 8, 1)), (3, 8, 8))
    made: Any = built
    chain = made(find_design("separable"))[1]
    assert all(part.weight.any() for part in chain.children()), "no layer of a chain gets a gradient through zeros"
    thin, usual = made(find_design("dense@0.5")), init_(nn.Conv2d(16, 16, 3))
    assert thin[2].weight is thin[4].weight
    assert (thin[2].weight.std() / usual.weight.std()).item() == pytest.approx(0.577, rel=0.1)  # scaled once
    normed: Any = Builder(lambda: nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 32, 3)), twice), (3, 8, 8))
    assert normed(find_design("lr"))(torch.zeros(1, 3, 8, 8)).shape[1] == 32
