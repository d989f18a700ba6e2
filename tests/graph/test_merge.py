"""Batch norms and chains are merged into one layer where that is exact; what a graph does not show so stays."""

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.learn_shapes import shape_network
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv, parse_scheme
from lowrank_cnn.models import create_model


def shaken(model: nn.Module) -> nn.Module:
    """Give every bias, mean and variance a value of its own."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
        elif getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
    return model


def has_norms(network: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in network.modules())


class Calls(nn.Module):
    """Layers in a row, called by a function of the module and its input."""

    def __init__(self, run, *layers: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(layers or (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())))
        self.held, self.run = [self.parts[0]], run  # where no tool looks for layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


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


@settings(max_examples=25)
@given(networks())
def test_merging_keeps_what_any_network_computes(net: nn.Module):
    x = torch.randn(2, 4, 64, 65, dtype=torch.float64)
    merged = merge(net, chains=True)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-9)
    assert not has_norms(merged)
    assert all(row.error is None or row.error < 1e-12 for row in notes(merged).merging)


@pytest.mark.parametrize(
    "name", ["vgg11-gmp-lr-join", "vgg11-gmp-sf", "googlenet-lr", "nin-c3-lr", "resnet18-small"]
)
def test_our_networks_merge_with_their_norms(name: str):
    net = shaken(create_model(name, width=0.05, norm="batch")).double().eval()
    merged = merge(net, chains=True)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-10)
    left = {name for name, part in merged.named_modules() if isinstance(part, nn.BatchNorm2d | FactoredConv2d)}
    assert left == {row.name for row in notes(merged).merging if "does not run" in row.reason}
    assert all(name.startswith(notes(net).auxiliary) for name in left)


FOLDS = [
    (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 6)),
    (nn.Conv3d(3, 4, 3, bias=False), nn.BatchNorm3d(4, affine=False), (2, 3, 5, 5, 5)),
    (nn.Linear(3, 4), nn.BatchNorm1d(4), (2, 3)),
    (nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (nn.ConvTranspose2d(6, 4, 3, 2, groups=2, dilation=2, bias=False), nn.BatchNorm2d(4), (2, 6, 5, 6)),
    (nn.ConvTranspose2d(4, 8, 2, 2, groups=4), nn.BatchNorm2d(8, affine=False), (2, 4, 5, 6)),
    (nn.ConvTranspose1d(3, 4, 4, 2), nn.BatchNorm1d(4), (2, 3, 6)),
    (nn.ConvTranspose3d(4, 2, 2, groups=2), nn.BatchNorm3d(2), (2, 4, 3, 3, 3)),
    (build_conv(3, 4, 3, "lr", bias=False), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (build_conv(3, 4, 3, "lr-join"), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (nn.Conv2d(3, 4, 3, padding="same", dilation=2), nn.SyncBatchNorm(4), (2, 3, 6, 6)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), FOLDS)
def test_a_norm_folds_exactly_into_the_layer_before_it(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]):
    net = shaken(copy.deepcopy(nn.Sequential(layer, norm, nn.ReLU()))).double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    merged = merge(net, example_input=x)
    assert type(merged[0]) is type(layer)
    assert isinstance(merged[1], nn.Identity)
    torch.testing.assert_close(merged(x), net(x), rtol=0, atol=1e-12)
    (row,) = notes(merged).merging
    assert row.error < 1e-12
    assert row.reason == ""
    if isinstance(layer, CompositeConv2d):
        assert count(merged, shape[1:]).macs == count(net, shape[1:]).macs
    if isinstance(layer, nn.Linear):
        with pytest.raises(LowRankError, match="two dimensions, not of 3"):
            merged(torch.randn(2, 4, 3, dtype=torch.float64))


def test_the_report_states_the_parts_and_the_error_of_a_single_layer_too():
    net = shaken(nn.Sequential(build_conv(3, 8, 3, "lr-join"), nn.BatchNorm2d(8), nn.ReLU())).eval()
    (row,) = notes(merge(net, chains=True)).merging
    assert (row.name, row.parts, row.reason) == ("0", ("basis", "join", "1"), "")
    assert 0 < row.error < 1e-5
    alone = merge(net[0], chains=True)
    assert isinstance(alone, nn.Conv2d)
    assert notes(alone).merging[0].name == ""


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


def test_chains_stay_unless_asked_for_or_cheaper():
    dear = nn.Sequential(build_conv(8, 8, 3, "lr-join")).eval()
    assert isinstance(merge(dear)[0], FactoredConv2d)
    assert isinstance(merge(dear, chains=True)[0], nn.Conv2d)
    stages = OrderedDict(basis=nn.Conv2d(4, 64, 1), join=nn.Conv2d(64, 4, 1))
    cheap = nn.Sequential(FactoredConv2d(stages, parse_scheme("lr-join"))).eval()
    assert isinstance(merge(cheap)[0], nn.Conv2d)
    assert isinstance(merge(cheap, chains=False)[0], FactoredConv2d)


def chain(first: nn.Module, second: nn.Module) -> nn.Sequential:
    stages = FactoredConv2d(OrderedDict(first=first, second=second), parse_scheme("separable"))
    return shaken(nn.Sequential(stages)).double().eval()


def along(size: tuple[int, int], **options: object) -> nn.Conv2d:
    return nn.Conv2d(4, 4, size, padding=(size[0] // 2, size[1] // 2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (along((3, 1), bias=False), along((1, 3)), ""),
        (along((3, 1), padding_mode="replicate"), along((1, 3), padding_mode="replicate"), ""),
        (along((3, 1)), nn.Conv2d(4, 6, (1, 3), stride=(1, 2)), ""),
        (along((3, 3), groups=2), nn.Conv2d(4, 6, 1, groups=2), ""),
        (nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 3, groups=6), ""),
        (along((3, 1)), along((3, 1)), "same axis"),
        (along((3, 1), groups=2), along((1, 3)), "channel groups"),
        (along((3, 1)), along((1, 3)), "bias meets the zero padding"),
        (along((3, 1), padding_mode="reflect", bias=False), along((1, 3), bias=False), "different ways"),
    ],
)
def test_a_chain_is_one_conv_where_that_is_exact(first: nn.Module, second: nn.Module, says: str):
    net, x = chain(copy.deepcopy(first), copy.deepcopy(second)), torch.randn(2, 4, 9, 8, dtype=torch.float64)
    merged = merge(net, chains=True, example_input=x)
    (row,) = notes(merged).merging
    torch.testing.assert_close(merged(x), net(x), rtol=0, atol=1e-12)
    assert isinstance(merged[0], FactoredConv2d if says else nn.Conv2d)
    assert says in row.reason
    assert (row.error is None) == bool(says)
    if says.startswith("bias"):
        nn.init.zeros_(net[0].first.bias)
        assert isinstance(merge(net, chains=True)[0], nn.Conv2d)


def test_a_norm_that_no_layer_feeds_alone_stays():
    def run(net: Calls, x: torch.Tensor) -> torch.Tensor:
        y = net.parts[0](x)
        return net.parts[1](y) + y

    net = shaken(Calls(run)).eval()
    merged = merge(net, example_input=torch.randn(1, 3, 4, 4))
    assert isinstance(merged.parts[1], nn.BatchNorm2d)
    assert "no layer" in notes(merged).merging[0].reason


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
    def run(net: Calls, x: torch.Tensor) -> torch.Tensor:
        conv, linear, norm = net.parts
        return norm(linear(torch.flatten(conv(x), 1)))

    net = shaken(Calls(run, nn.Conv2d(3, 4, 32), nn.Linear(4, 6), nn.BatchNorm1d(6))).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    merged = merge(net)
    assert isinstance(merged.parts[2], nn.Identity)
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


def test_a_network_of_nan_is_left_alone_or_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    nn.init.constant_(net[0].weight, float("nan"))
    assert isinstance(merge(net)[1], nn.BatchNorm2d)
    with pytest.raises(LowRankError, match="NaN or infinite"):
        merge(net, example_input=torch.randn(1, 3, 8, 8))


def test_a_transposed_conv_that_is_called_with_a_size_keeps_its_norm():
    sized = Calls(
        lambda net, x: net.parts[1](net.parts[0](x, output_size=(12, 12))),
        nn.ConvTranspose2d(3, 4, 3, 2), nn.BatchNorm2d(4),
    )  # fmt: skip
    net, x = shaken(sized).double().eval(), torch.randn(1, 3, 5, 5, dtype=torch.float64)
    merged = merge(net, example_input=x)
    torch.testing.assert_close(merged(x), net(x))
    assert isinstance(merged.parts[1], nn.BatchNorm2d)


# Networks and layers that have a forward of their own.


def walked(net: Calls, x: torch.Tensor) -> torch.Tensor:
    """Call the parts one by one, depending on values: no trace shows it."""
    if x.sum() > 1e9:
        return x
    seen = []
    for layer in net.parts:
        x = layer(x)
        seen.append(x.mean((2, 3)))
    return torch.cat(seen, dim=1)


UNSHOWN = {
    "walked": walked,
    "a layer runs twice": lambda net, x: net.parts(x) + net.parts[0](x),
    "a weight is read": lambda net, x: net.parts(x) * net.parts[0].weight.sum(),
    "a layer is held elsewhere": lambda net, x: net.parts(x) + net.held[0](x),
}


@pytest.mark.parametrize("run", UNSHOWN)
@pytest.mark.parametrize("given", [True, False])
def test_what_a_graph_does_not_show_to_be_exact_stays(run: str, given: bool):
    net = shaken(Calls(UNSHOWN[run])).eval()
    x = torch.randn(2, 3, 32, 32)
    merged = merge(net, chains=True, example_input=x if given else None)
    assert torch.equal(merged(x), net(x))
    assert all(row.reason for row in notes(merged).merging)
    assert has_norms(merged)


class Standardised(nn.Conv2d):
    """Normalises its weight at every call: scaling the weight changes nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


class NoBias(nn.Conv2d):
    """Leaves its bias out, whatever it is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.weight, None)


@pytest.mark.parametrize("kind", [Standardised, NoBias])
def test_a_conv_with_a_forward_of_its_own_keeps_its_norm(kind: type[nn.Conv2d]):
    net = shaken(nn.Sequential(kind(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).double().eval()
    merged = merge(net)
    assert isinstance(merged[1], nn.BatchNorm2d)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x))


class Unit(nn.Module):
    """A conv and its norm, for every size; or with a path around the norm for small maps."""

    def __init__(self, *, around: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.around = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y if self.around and x.shape[2] < 8 else self.norm(y)


class WithOptions(nn.Module):
    """Looks at the size of its input and at an option, as Hugging Face's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.around = Unit(), Unit(around=True)
        self.outside, self.outside_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor, raw: bool | None = None) -> torch.Tensor:
        y = self.outside(self.around(self.plain(x)))
        return y if raw or x.shape[2] < 4 else self.outside_norm(y)


def test_of_a_network_with_options_the_pairs_that_hold_for_every_call_are_folded():
    net = shaken(WithOptions()).eval()
    merged = merge(net, example_input=torch.randn(1, 4, 8, 8))
    assert isinstance(merged.plain.norm, nn.Identity)
    assert isinstance(merged.around.norm, nn.BatchNorm2d)
    assert isinstance(merged.outside_norm, nn.BatchNorm2d)
    for size, options in ((8, {}), (8, {"raw": True}), (6, {}), (3, {})):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(merged(x, **options), net(x, **options), rtol=1e-4, atol=1e-5)


class ByKeyword(nn.Module):
    """Calls its layers by the names of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(input=self.conv(input=x)))
        return self.head(input=y.mean((2, 3)))


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: lr.merge(net, example_input=x),
        lambda net, x: lr.optimize(net, x, compile=False, cache=False, repeats=3),
        lambda net, x: lr.decompose(net, "lr-join", images=x),
        lambda net, x: shape_network(net, parse_scheme("learned(kx1, kxk)"), (3, 8, 8)),
    ],
)
def test_layers_called_by_keyword_are_layers_like_others(run):
    net, x = shaken(ByKeyword()).eval(), torch.randn(2, 3, 8, 8)
    made = run(net, x)
    assert made(x).shape == (2, 4)
    assert not getattr(made, "report", None) or not made.report.failed
    if notes(made).merging:
        assert isinstance(made.norm, nn.Identity)
        torch.testing.assert_close(made(x), net(x), rtol=1e-4, atol=1e-4)


def test_layers_called_by_keyword_are_advised_on():
    assert str(lr.design(shaken(ByKeyword()).eval(), torch.randn(2, 3, 8, 8), macs=0.5, repeats=3))
