import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_values import shaken
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv, parse_scheme
from lowrank_cnn.models import create_model


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """A few layers of any kind and geometry, some normed, in float64 and in evaluation."""
    channels, layers = 4, []
    for _ in range(draw(st.integers(1, 3))):
        layers.append(
            build_conv(
                channels,
                filters := 2 * draw(st.integers(2, 4)),
                draw(st.sampled_from([2, 3, (3, 5)])),
                draw(st.sampled_from(["dense", "lr", "lr-join", "separable", "mixture(kx1, kxk, join)"])),
                stride=draw(st.sampled_from([1, 2, (1, 2)])),
                padding=draw(st.sampled_from(["same", "valid", 1, (2, 0)])),
                dilation=draw(st.sampled_from([1, 2])),
                channel_groups=draw(st.sampled_from([1, 1, 2])),
                padding_mode=draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"])),
                bias=draw(st.booleans()),
            )
        )
        channels = filters
        if draw(st.booleans()):
            layers.append(nn.BatchNorm2d(channels, affine=draw(st.booleans())))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.Identity()])))
    return shaken(nn.Sequential(*layers)).double().eval()


@settings(max_examples=60)
@given(networks())
def test_merging_keeps_what_any_network_computes(net: nn.Module):
    x = torch.randn(2, 4, 64, 65, dtype=torch.float64)
    merged = merge(net, chains=True)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-9)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    assert all(row.error is None or row.error < 1e-12 for row in notes(merged).merging)


@pytest.mark.parametrize("name", ["vgg11-gmp-lr-join", "vgg11-gmp-sf", "googlenet-lr", "nin-c3-lr"])
def test_our_networks_merge_with_their_norms(name: str):
    net = shaken(create_model(name, width=0.05, norm="batch")).double().eval()
    merged = merge(net, chains=True)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-10)
    left = {name for name, part in merged.named_modules() if isinstance(part, nn.BatchNorm2d | FactoredConv2d)}
    assert left == {row.name for row in notes(merged).merging if "does not run" in row.reason}
    assert all(name.startswith(notes(net).auxiliary) for name in left)


def test_the_callers_network_stays_as_it_was():
    net = shaken(create_model("nin", width=0.05, norm="batch", scheme="lr-join")).eval()
    before, state = str(net), copy.deepcopy(net.state_dict())
    merge(net)
    assert str(net) == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


def test_the_report_states_the_parts_and_the_error():
    net = shaken(nn.Sequential(build_conv(3, 8, 3, "lr-join"), nn.BatchNorm2d(8), nn.ReLU())).eval()
    (row,) = notes(merge(net, chains=True)).merging
    assert (row.name, row.parts, row.reason) == ("0", ("basis", "join", "1"), "")
    assert 0 < row.error < 1e-5


def test_chains_and_norms_can_be_kept():
    net = shaken(nn.Sequential(build_conv(3, 8, 3, "lr-join"), nn.BatchNorm2d(8))).double().eval()
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    apart, normed = merge(net, chains=False), merge(net, norms=False, chains=True)
    assert isinstance(apart[0], FactoredConv2d)
    assert isinstance(apart[1], nn.Identity)
    assert isinstance(normed[0], nn.Conv2d)
    assert isinstance(normed[1], nn.BatchNorm2d)
    for other in (apart, normed):
        torch.testing.assert_close(other(x), net(x))


def test_a_composite_takes_a_norm_and_keeps_its_groups():
    net = shaken(nn.Sequential(build_conv(3, 8, 3, "lr", bias=False), nn.BatchNorm2d(8))).eval()
    merged = merge(net)
    assert isinstance(merged[0], CompositeConv2d)
    assert merged[0].bias is not None
    assert count(merged, (3, 8, 8)).macs == count(net, (3, 8, 8)).macs


def separable(**options) -> nn.Sequential:
    return nn.Sequential(shaken(build_conv(3, 4, 3, "separable", **options))).double().eval()


def test_a_bias_before_zero_padding_keeps_a_pair_apart():
    net = separable()
    merged = merge(net, chains=True)
    assert isinstance(merged[0], FactoredConv2d)
    (row,) = notes(merged).merging
    assert "bias meets the zero padding" in row.reason
    assert row.error is None


@pytest.mark.parametrize("options", [{"bias": False}, {"padding": 0}, {"padding_mode": "replicate"}])
def test_a_separable_pair_merges_where_its_borders_allow(options: dict):
    net = separable(**options)
    merged = merge(net, chains=True)
    assert isinstance(merged[0], nn.Conv2d)
    x = torch.randn(2, 3, 7, 9, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x))


def test_a_bias_of_zeros_does_not_keep_a_pair_apart():
    net = separable()
    nn.init.zeros_(net[0].first.bias)
    assert isinstance(merge(net, chains=True)[0], nn.Conv2d)


def test_channel_groups_that_do_not_match_stay_apart():
    stages = OrderedDict(basis=nn.Conv2d(4, 8, (3, 1), groups=2), join=nn.Conv2d(8, 8, 1))
    chain = FactoredConv2d(stages, parse_scheme("lr-join"))
    (row,) = notes(merge(nn.Sequential(chain).eval(), chains=True)).merging
    assert "channel groups" in row.reason


def test_a_basis_in_channel_groups_and_its_join_become_a_grouped_conv():
    (conv,) = merge(nn.Sequential(build_conv(4, 8, 3, "lr-join", channel_groups=2)).eval(), chains=True)
    assert conv.groups == 2


def test_layers_that_reach_along_one_axis_stay_apart():
    stages = OrderedDict(first=nn.Conv2d(2, 2, (3, 1)), second=nn.Conv2d(2, 2, (3, 1)))
    chain = FactoredConv2d(stages, parse_scheme("separable"))
    (row,) = notes(merge(nn.Sequential(chain).eval(), chains=True)).merging
    assert "same axis" in row.reason


def test_a_norm_that_no_layer_feeds_alone_stays():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    net = shaken(Residual()).eval()
    merged = merge(net, example_input=torch.randn(1, 3, 4, 4))
    assert isinstance(merged.norm, nn.BatchNorm2d)
    assert "no layer" in notes(merged).merging[0].reason


def test_a_linear_layer_takes_its_norm():
    net = shaken(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    merged = merge(net, example_input=x)
    assert isinstance(merged[1], nn.Identity)
    torch.testing.assert_close(merged(x), net(x))


def test_a_decomposed_foreign_network_merges():
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    net = shaken(convert(net, "separable", allow_costlier=True)).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    merged = merge(net, chains=True, example_input=x)
    assert [type(module) for module in merged] == [nn.Conv2d, nn.Identity, nn.ReLU]
    torch.testing.assert_close(merged(x), net(x))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(build_conv(3, 8, 3, "lr-join")), "training mode"),
        (lambda: nn.Conv2d(3, 4, 3, device="meta").eval(), "meta device"),
        (lambda: "vgg11", "an nn.Module, not str"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        merge(make())


def test_a_network_without_a_known_input_is_left_alone_and_says_so():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) + y

    net = shaken(Two()).eval()
    (row,) = notes(merge(net)).merging
    assert "pass example_input" in row.reason
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
    merged = merge(net, example_input=(x, y))
    assert isinstance(merged.norm, nn.Identity)
    torch.testing.assert_close(merged(x, y), net(x, y), rtol=1e-4, atol=1e-5)


def test_a_norm_over_another_axis_stays():
    net = shaken(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))).eval()
    x = torch.randn(5, 6, 4)
    for merged in (merge(net), merge(net, example_input=x)):
        assert torch.equal(merged(x), net(x))
        assert "another axis" in notes(merged).merging[0].reason
    folded = merge(net, example_input=torch.randn(5, 4))
    with pytest.raises(LowRankError, match="two dimensions"):
        folded(x)


def test_a_flattened_linear_layer_takes_its_norm_without_an_example():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc, self.norm = nn.Conv2d(3, 4, 32), nn.Linear(4, 6), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.fc(torch.flatten(self.conv(x), 1)))

    net = shaken(Head()).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    merged = merge(net)
    assert isinstance(merged.norm, nn.Identity)
    torch.testing.assert_close(merged(x), net(x))


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("hook", [*HOOKS, "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1])
def test_layers_with_hooks_stay(hook: str, place: int):
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).eval()
    called = []
    getattr(net[place], hook)(lambda *_: called.append(1))
    merged = merge(net)
    assert isinstance(merged[1], nn.BatchNorm2d)
    called.clear()
    merged(torch.randn(1, 3, 8, 8, requires_grad=True)).sum().backward()
    assert called


def test_chains_stay_unless_asked_for_or_cheaper():
    dear = nn.Sequential(build_conv(8, 8, 3, "lr-join")).eval()
    assert isinstance(merge(dear)[0], FactoredConv2d)
    assert isinstance(merge(dear, chains=True)[0], nn.Conv2d)
    stages = OrderedDict(basis=nn.Conv2d(4, 64, 1), join=nn.Conv2d(64, 4, 1))
    cheap = nn.Sequential(FactoredConv2d(stages, parse_scheme("lr-join"))).eval()
    assert isinstance(merge(cheap)[0], nn.Conv2d)
    assert isinstance(merge(cheap, chains=False)[0], FactoredConv2d)


def test_a_single_chain_is_merged():
    chain = build_conv(3, 8, 3, "lr-join").eval()
    merged = merge(chain, chains=True)
    assert isinstance(merged, nn.Conv2d)
    assert notes(merged).merging[0].name == ""


def test_a_network_of_nan_is_left_alone_or_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    nn.init.constant_(net[0].weight, float("nan"))
    assert isinstance(merge(net)[1], nn.BatchNorm2d)
    with pytest.raises(LowRankError, match="NaN or infinite"):
        merge(net, example_input=torch.randn(1, 3, 8, 8))


def test_random_generators_stay_where_they_are():
    """Layers draw weights when they are built; merged and fitted weights are not drawn."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    before = torch.get_rng_state()
    merge(decompose(net, energy=0.5), chains=True)
    merge(decompose(net, macs=0.5, input_size=(8, 9, 9)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("groups", [1, 2])
def test_norms_behind_transposed_convs_are_folded(groups: int):
    up = [nn.ConvTranspose2d(4, 8, 3, 2, 1, output_padding=1, groups=groups), nn.BatchNorm2d(8), nn.ReLU()]
    last = [nn.ConvTranspose2d(8, 6, 2, 2, groups=groups, bias=False), nn.BatchNorm2d(6)]
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), *up, *last)).double().eval()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    merged = merge(net, example_input=x)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-10)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    assert all(row.error is not None and row.error < 1e-12 for row in notes(merged).merging)


def test_a_transposed_conv_that_is_called_with_a_size_keeps_its_norm():
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.ConvTranspose2d(3, 4, 3, 2), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.up(x, output_size=(12, 12)))

    net, x = shaken(Sized()).double().eval(), torch.randn(1, 3, 5, 5, dtype=torch.float64)
    merged = merge(net, example_input=x)
    torch.testing.assert_close(merged(x), net(x))
    assert isinstance(merged.norm, nn.BatchNorm2d)
