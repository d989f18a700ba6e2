import copy
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.activations import output_error, outputs
from lowrank_cnn.method.budget import Budget, _time_ratio, schemes_of, within
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import (
    both_keeps,
    curves_of,
    decompose,
    max_useful_rank,
    measured_keeps,
    nearest_output,
)
from lowrank_cnn.method.rewrite import rewrite
from lowrank_cnn.method.schemes import FactoredConv2d, parse_scheme
from lowrank_cnn.models import create_model


def trained(seed: int = 0, **options) -> nn.Sequential:
    torch.manual_seed(seed)
    first = nn.Conv2d(4, 12, 3, **{"padding": 1, **options})
    second = nn.Conv2d(12, 8, (3, 5), padding="same", bias=False)
    return nn.Sequential(first, nn.ReLU(), second).double()


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 0}, {"groups": 2}, {"padding_mode": "reflect"}]
)
@pytest.mark.parametrize("scheme", ["separable(m=64)", "separable(kx1, 1xk, m=64)"])
def test_a_separable_pair_of_full_rank_is_the_dense_conv(scheme: str, options: dict):
    net = trained(**options)
    new = decompose(net, scheme, allow_costlier=True)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x))
    assert all(row.energy == pytest.approx(1) for row in notes(new).decomposition)
    assert [row.m for row in notes(new).decomposition] == [64, 64]


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


@settings(max_examples=60)
@given(networks(), st.sampled_from(["separable(m=48)", "separable(kx1, 1xk, m=48)"]))
def test_any_network_of_full_rank_is_the_dense_one_also_merged(net: nn.Sequential, scheme: str):
    x = torch.randn(2, 4, 19, 20, dtype=torch.float64)  # two convs of reach 7 and stride 2 leave one row
    new = decompose(net, scheme, where=lambda name, conv: True, allow_costlier=True)
    torch.testing.assert_close(new(x), net(x))
    torch.testing.assert_close(merge(new, chains=True)(x), net(x))


@pytest.mark.parametrize("scheme", ["lr-join(m=60)", "mixture(kx1, 1xk, kxk, join, m=90)"])
def test_a_basis_with_its_join_fits_what_has_no_corners(scheme: str):
    net = trained()
    with torch.no_grad():
        net[0].weight[:, :, ::2, ::2] = 0
        net[2].weight[:, :, ::2, [0, 1, 3, 4]] = 0
    new = decompose(net, scheme, allow_costlier=True)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x), rtol=0, atol=1e-6)


def test_the_callers_network_stays_as_it_was():
    net = trained()
    before = copy.deepcopy(net.state_dict())
    new = decompose(net, "separable(m=4)")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert isinstance(new[0], FactoredConv2d)
    assert torch.equal(new[0].second.bias, net[0].bias)
    assert new[0].first.bias is None  # so that the two can be merged exactly
    assert new[2].second.bias is None


def test_a_fitted_pair_merges_back_to_a_dense_conv():
    new = decompose(trained(), "separable(m=64)", allow_costlier=True).eval()
    merged = merge(new, chains=True)
    assert [type(layer) for layer in merged] == [nn.Conv2d, nn.ReLU, nn.Conv2d]


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


def test_a_larger_budget_keeps_more():
    net, size = trained(), (4, 12, 12)
    small, large = (decompose(net, "separable", macs=share, input_size=size) for share in (0.3, 0.6))
    assert prod(row.energy for row in notes(large).decomposition) > prod(
        row.energy for row in notes(small).decomposition
    )


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
        ({"energy": 1.5}, "energy is a share"),
        ({"macs": "half"}, "macs is a share"),
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
