"""Trained filters are approximated: by weights, by images, within a budget, layer by layer."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.budget import Budget, _time_ratio, schemes_of, within
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import (
    both_keeps,
    curves_of,
    decompose,
    image_batches,
    max_useful_rank,
    measured_keeps,
    nearest_output,
    output_error,
    outputs,
    refit,
    relative_error,
    seen,
)
from lowrank_cnn.method.rewrite import replacement, rewrite
from lowrank_cnn.method.schemes import fit_layer, parse_scheme
from lowrank_cnn.models import create_model


def trained(seed: int = 0, **options) -> nn.Sequential:
    torch.manual_seed(seed)
    first = nn.Conv2d(4, 12, 3, **{"padding": 1, **options})
    second = nn.Conv2d(12, 8, (3, 5), padding="same", bias=False)
    return nn.Sequential(first, nn.ReLU(), second).double()


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    """Two convs of any geometry with batch norms, for inference."""
    layers: list[nn.Module] = []
    channels = 4
    for _ in range(2):
        groups = draw(st.sampled_from([1, 2]))
        filters = 2 * draw(st.integers(2, 4))
        padding = draw(st.sampled_from(["same", 0, 1, (2, 1)]))
        conv = nn.Conv2d(
            channels,
            filters,
            draw(st.tuples(st.integers(2, 4), st.integers(2, 4))),
            stride=1 if padding == "same" else draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
            padding=padding,
            dilation=draw(st.integers(1, 2)),
            groups=groups,
            bias=draw(st.booleans()),
            padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
        )
        layers += [conv, nn.BatchNorm2d(filters), nn.ReLU()]
        channels = filters
    return nn.Sequential(*layers).double().eval()


@settings(max_examples=25)
@given(networks(), st.sampled_from(["separable(m=48)", "separable(kx1, 1xk, m=48)"]))
def test_any_network_of_full_rank_is_the_dense_one_also_merged(net: nn.Sequential, scheme: str):
    x = torch.randn(2, 4, 19, 20, dtype=torch.float64)  # two convs of reach 7 and stride 2 leave one row
    new = decompose(net, scheme, where=lambda name, conv: True, allow_costlier=True)
    torch.testing.assert_close(new(x), net(x))
    torch.testing.assert_close(merge(new, chains=True)(x), net(x))
    assert [(row.m, row.energy) for row in notes(new).decomposition] == 2 * [(48, pytest.approx(1))]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scheme", ["lr-join(m=60)", "mixture(kx1, 1xk, kxk, join, m=90)"])
def test_a_basis_with_its_join_fits_what_has_no_corners_group_by_group(scheme: str, groups: int):
    net = trained(groups=groups)
    with torch.no_grad():
        net[0].weight[:, :, ::2, ::2] = 0
        net[2].weight[:, :, ::2, [0, 1, 3, 4]] = 0
    new = decompose(net, scheme, where="*", allow_costlier=True)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x), rtol=0, atol=1e-6)
    assert [row.energy for row in notes(new).decomposition] == 2 * [pytest.approx(1)]


def test_energy_takes_the_fewest_filters_that_keep_it():
    net = trained()
    new = decompose(net, "separable", energy=0.9)
    for row in notes(new).decomposition:
        assert row.energy >= 0.9
        fewer = notes(decompose(net, f"separable(m={row.m - 1})", where=row.name)).decomposition[0]
        assert fewer.energy < 0.9


def test_energy_that_a_scheme_cannot_keep_cheaply_leaves_a_layer_dense():
    net = trained()
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight[:1, :1].clone())
    new = decompose(net, "separable", energy=0.99)
    assert isinstance(new[2], nn.Conv2d)
    assert [(row.name, row.reason) for row in notes(new).conversion.kept] == [("2", "cheaper dense")]
    with pytest.raises(LowRankError, match="makes no layer cheaper"):
        decompose(trained(), "lr-join", energy=0.999)


@pytest.mark.parametrize("scheme", ["separable", "lr-join"])
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_a_budget_of_macs_is_kept_and_used(scheme: str, share: float):
    net, size = create_model("nin", width=0.15), (3, 16, 16)
    new = decompose(net, scheme, macs=share, input_size=size)
    spent = count(new, size).macs / count(net, size).macs
    assert share - 0.02 < spent <= share


@pytest.mark.parametrize("scheme", ["separable", "separable(kx1, 1xk)", "lr-join"])
def test_a_budget_is_kept_where_strides_and_borders_make_halves_dearer(scheme: str):
    net = nn.Sequential(nn.Conv2d(3, 16, 7, stride=2), nn.ReLU(), nn.Conv2d(16, 16, (3, 5), stride=(2, 1)))
    size = (3, 33, 30)
    for share in (0.4, 0.6, 0.8):
        new = decompose(net, scheme, macs=share, input_size=size)
        assert share - 0.15 < count(new, size).macs / count(net, size).macs <= share


def test_a_budget_counts_every_use_of_a_shared_layer():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.names = nn.ModuleList([self.conv])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.names[0](self.conv(x))

    net, size = Twice(), (8, 12, 12)
    new = decompose(net, "separable", macs=0.5, input_size=size)
    assert new.conv is new.names[0]
    assert 0.4 < count(new, size).macs / count(net, size).macs <= 0.5
    assert not net.conv.weight.is_meta


def test_a_budget_of_time_takes_the_dearest_network_that_is_fast_enough(monkeypatch: pytest.MonkeyPatch):
    net, size = create_model("nin", width=0.15), (3, 16, 16)
    dense = count(net, size).macs

    def ratio(model: nn.Module, chosen: dict, input_size) -> float:
        """As if time were multiply-accumulates and a fixed part."""
        return 0.1 + 0.9 * count(rewrite(model, schemes_of(chosen)), input_size).macs / dense

    monkeypatch.setattr("lowrank_cnn.method.budget._time_ratio", ratio)
    spent = count(decompose(net, "separable", latency=0.6, input_size=size), size).macs / dense
    assert 0.4 < 0.1 + 0.9 * spent <= 0.6
    with pytest.raises(LowRankError, match="more than 10% of the dense network's time"):
        decompose(net, "separable", latency=0.1, input_size=size)


def test_time_is_measured_beside_the_dense_network():
    net = create_model("nin", width=0.05)
    chosen = {"features.conv1_1": parse_scheme("separable(m=4)"), "features.conv2_1": None}
    assert _time_ratio(net, chosen, (3, 16, 16)) > 0


def test_frozen_layers_are_fitted_and_stay_frozen():
    net = trained().requires_grad_(False)
    assert not any(p.requires_grad for p in decompose(net, "separable").parameters())


def test_more_filters_than_a_fit_can_use_are_not_bought():
    net = trained()
    assert max_useful_rank(net[0], parse_scheme("separable")) == 8
    with torch.no_grad():
        net[2].weight[:, :, ::2, [0, 1, 3, 4]] = 0
    row = notes(decompose(net, "lr-join", where="2", energy=0.999)).decomposition[0]
    assert row.m <= 16
    assert row.energy >= 0.999


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scheme": "lr"}, "mixes nothing"),
        ({"scheme": "mixture"}, "mixes nothing"),
        ({"scheme": "dense"}, "mixes nothing"),
        ({"scheme": "embed"}, "number of channels"),
        ({"energy": 0.9, "macs": 0.5}, "energy and macs"),
        ({"energy": 1.5}, "energy must be a number above 0 and at most 1"),
        ({"macs": "half"}, "macs must be a number above 0 and at most 1"),
        ({"macs": 0.5}, "size of the images"),
        ({"macs": 0.001, "input_size": (4, 8, 8)}, "is below 0.071, what the fewest"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        decompose(trained(), **options)


def test_a_network_without_weights_is_refused():
    with torch.device("meta"), pytest.raises(LowRankError, match="meta device"):
        decompose(nn.Conv2d(3, 8, 3))
    with pytest.raises(LowRankError, match="not finite"):
        decompose(nn.Conv2d(3, 8, 3).apply(lambda conv: nn.init.constant_(conv.weight, float("nan"))))


def test_with_images_no_single_way_is_nearer_to_the_output():
    """By weights alone, by measured effect, refitted: all of these compete with both together."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(),
        nn.Conv2d(12, 8, 3, padding=1),
    ).double().eval()  # fmt: skip
    images = [torch.randn(16, 3, 8, 8, dtype=torch.float64)]
    convs, scheme, size = {name: net[int(name)] for name in ("0", "2", "4")}, parse_scheme("separable"), (3, 8, 8)
    right = outputs(net, images)
    measured = measured_keeps(net, convs, scheme, images)
    ways = [None, measured, both_keeps(convs, scheme, measured)]
    curves = [curves_of(net, convs, scheme, size, keeps=one) for one in ways]
    choices = [within(net, *one, Budget("macs", 0.3), size) for one in curves]
    alone = [nearest_output(net, [choice], images)[0] for choice in choices]
    alone.append(decompose(net, macs=0.3, input_size=size))
    new = decompose(net, macs=0.3, images=images)
    assert count(new, size).macs <= 0.3 * count(net, size).macs
    error = output_error(outputs(new, images), right)
    assert error <= min(output_error(outputs(one, images), right) for one in alone) * (1 + 1e-9)


def test_costlier_layers_are_allowed_under_a_share_of_energy_too():
    conv = nn.Conv2d(8, 16, 3, padding=1)
    net = nn.Sequential(conv, nn.ReLU())
    with pytest.raises(LowRankError, match="allow_costlier=True"):
        decompose(net, energy=0.999999)
    new = decompose(net, energy=0.999999, allow_costlier=True)
    x = torch.randn(2, 8, 9, 9)
    torch.testing.assert_close(new(x), net(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_single_basis_filter_is_enough_to_fit(padding: int):
    (row,) = notes(decompose(nn.Sequential(nn.Conv2d(3, 8, 3, padding=padding)), "lr-join(m=1)")).decomposition
    assert (row.m, 0 < row.energy < 1) == (1, True)


def test_convert_takes_the_fit_as_its_init():
    net = trained()
    new = convert(net, "separable(m=64)", init=fit_layer, allow_costlier=True)
    x = torch.randn(1, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x))


@pytest.mark.parametrize("score", [0.0, -1.5, float("inf")])
def test_shares_of_a_score_need_a_positive_one(score: float):
    """A share of a negative loss would be larger for a worse network."""
    net = trained()
    with pytest.raises(LowRankError, match="a score is positive"):
        measured_keeps(net, {"0": net[0]}, parse_scheme("separable"), [], lambda network: score)


CONVS = [
    nn.Conv2d(8, 12, 3, padding=1),
    nn.Conv2d(8, 12, 5, stride=2, padding=2, groups=2, bias=False),
    nn.Conv2d(8, 8, (3, 5), padding="same", padding_mode="reflect", dilation=2),
    nn.Conv2d(8, 12, 4, padding="same"),
]


def smooth_images(n: int = 6) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, as those of photographs are."""
    x = torch.randn(n, 8, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nn.functional.avg_pool2d(x, 3, 1, 1).cumsum(1)


@pytest.mark.parametrize("conv", CONVS, ids=lambda conv: str(conv.kernel_size))
@pytest.mark.parametrize("scheme", ["separable(m=4)", "lr-join(m=4)", "mixture(kx1, 1xk, kxk, join, m=6)"])
@torch.no_grad()
def test_no_other_second_half_is_nearer(conv: nn.Conv2d, scheme: str):
    torch.manual_seed(0)
    conv, x = copy.deepcopy(conv).double(), smooth_images()
    layer = replacement(conv, parse_scheme(scheme))
    fit_layer("conv", conv, layer)
    right = conv(x)
    before = relative_error(layer(x), right)
    said = refit(layer, [x], [right])
    after = relative_error(layer(x), right)
    assert after <= before
    assert said == pytest.approx(after, rel=1e-6)
    last = layer[1].weights[0] if hasattr(layer[1], "weights") else layer[1].weight
    for _ in range(3):
        shaken = copy.deepcopy(layer)
        other = shaken[1].weights[0] if hasattr(shaken[1], "weights") else shaken[1].weight
        other.add_(0.05 * last.abs().mean() * torch.randn_like(other))
        assert relative_error(shaken(x), right) > after


def test_a_network_decomposed_on_images_keeps_more_of_its_output():
    torch.manual_seed(0)
    net = nn.Sequential(
        CONVS[0], nn.ReLU(), nn.Conv2d(12, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 4, 3)
    ).double()
    x, size = smooth_images(12), (8, 14, 14)
    blind = decompose(net, macs=0.4, input_size=size)
    seeing = decompose(net, macs=0.4, images=x[:8])
    errors = [output_error(outputs(new, [x[8:]]), outputs(net, [x[8:]])) for new in (blind, seeing)]
    assert errors[1] < errors[0]
    assert all(row.error is not None and 0 <= row.error < 1 for row in notes(seeing).decomposition)
    assert notes(blind).decomposition[0].error is None


def test_a_score_chooses_where_filters_go():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2)).double()

    def first_matters(model: nn.Module) -> float:
        return 1 - 0.9 * (not isinstance(model[0], nn.Conv2d))

    new = decompose(net, macs=0.6, input_size=(8, 10, 10), evaluate=first_matters)
    assert isinstance(new[0], nn.Conv2d)
    with pytest.raises(LowRankError, match="evaluate gives a number"):
        decompose(net, macs=0.6, input_size=(8, 10, 10), evaluate=lambda model: "good")


def test_modes_and_hooks_are_left_as_they_were():
    net = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12)).double().train()
    before = copy.deepcopy(net.state_dict())
    decompose(net, "separable(m=4)", images=smooth_images())
    assert all(module.training and not module._forward_hooks for module in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_batches_come_with_labels_or_without():
    net, x = nn.Conv2d(8, 4, 3), smooth_images()
    pairs = image_batches([(x[:2], torch.zeros(2)), x[2:]], net)
    assert [len(batch) for batch in pairs] == [2, 4]
    assert pairs[0].dtype == torch.float32
    assert len(seen(net, net, pairs)) == 2


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([], "no images"),
        (["a"], "are a tensor"),
        (TensorDataset(torch.zeros(4, 8, 9, 9)), "a Dataset gives single images"),
        (torch.full((2, 8, 5, 5), torch.nan), "not finite"),
        (torch.zeros(2, 3, 9, 9), "does not run on images of"),
    ],
)
def test_bad_images_are_refused_in_a_sentence(images: object, says: str):
    with pytest.raises(LowRankError, match=says):
        decompose(nn.Sequential(nn.Conv2d(8, 12, 3)), "separable(m=4)", images=images)


class TwoHeads(nn.Module):
    """Two outputs, and a layer that the second alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.classes = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        x = self.body(x).relu()
        return {"loss": None, "boxes": self.boxes(x), "classes": [self.classes(x), torch.ones(2).long()]}


def test_every_output_counts_when_layers_compete():
    """By the first output alone, the second head would be worth nothing, and lose nearly all of its filters."""
    torch.manual_seed(0)
    net, x = TwoHeads().double(), smooth_images()
    new = decompose(net, macs=0.6, images=x)
    ranks = {row.name: row.m for row in notes(new).decomposition}
    assert ranks.get("classes", 8) >= 4, ranks
    boxes, classes = outputs(net, [x, x])
    assert boxes.shape == classes.shape == (2 * x.numel(),)
    assert output_error([boxes, 2 * classes], [boxes, classes]) == pytest.approx(0.5)
    assert output_error([boxes[1:], classes], [boxes, classes]) == float("inf")
