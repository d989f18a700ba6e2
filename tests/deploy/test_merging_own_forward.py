"""Merging networks and layers that have a forward of their own: what a graph does not show to be exact stays."""

import pytest
import torch
from random_values import shaken
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.learn_shapes import shape_network
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.schemes import parse_scheme


class Walks(nn.Module):
    """Uses the parts of a Sequential one by one, and depends on values: no trace shows what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        seen = []
        for layer in self.block:
            x = layer(x)
            seen.append(x.mean((2, 3)))
        return torch.cat(seen, dim=1)


class Twice(nn.Module):
    """Runs a block, and its first layer once more."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.block[0](x)


class ReadsWeights(nn.Module):
    """Uses the weight of a layer directly, beside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.conv.weight.sum()


class Hidden(nn.Module):
    """Holds a layer where no tool looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.held = [self.conv]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) + self.held[0](x)


@pytest.mark.parametrize("kind", [Walks, Twice, ReadsWeights, Hidden])
@pytest.mark.parametrize("given", [True, False])
def test_what_a_graph_does_not_show_to_be_exact_stays(kind: type[nn.Module], given: bool):
    net = shaken(kind()).eval()
    x = torch.randn(2, 3, 32, 32)
    merged = merge(net, chains=True, example_input=x if given else None)
    assert torch.equal(merged(x), net(x))
    assert all(row.reason for row in notes(merged).merging)
    assert any(isinstance(part, nn.BatchNorm2d) for part in merged.modules())


def test_norms_in_blocks_written_by_hand_are_folded():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            y += x
            return self.relu(y)

    net = shaken(Residual()).double().eval()
    merged = merge(net)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in merged.modules())
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x))


class Padded(nn.Conv2d):
    """Pads its input by a layer of its own before the conv, as ports of other frameworks do."""

    def __init__(self, *options) -> None:
        super().__init__(*options)
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(self.pad(input), self.weight, self.bias, self.stride)


class Standardised(nn.Conv2d):
    """Normalises its weight at every call: scaling the weight changes nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


class NoBias(nn.Conv2d):
    """Leaves its bias out, whatever it is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.weight, None)


@pytest.mark.parametrize(("kind", "folds"), [(Padded, True), (Standardised, False), (NoBias, False)])
def test_convs_with_a_forward_of_their_own(kind: type[nn.Conv2d], folds: bool):
    net = shaken(nn.Sequential(kind(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).double().eval()
    merged = merge(net)
    assert isinstance(merged[0], kind)
    assert isinstance(merged[1], nn.Identity) == folds
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


class LooksAtAttributes(nn.Module):
    """Its norm depends on a number, a flag or a string that is set from outside."""

    def __init__(self, choose) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 4, 3), nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.named = nn.ModuleDict({"day": nn.BatchNorm2d(4)})
        self.domain, self.normed, self.time, self.channels = 0, True, "day", 4
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.choose(self, y).flatten(2).view(-1, self.channels, 36)


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda net, y: net.norms[net.domain](y), "domain = 0"),
        (lambda net, y: net.norms[0](y) if net.normed else y, "normed = True"),
        (lambda net, y: net.norms[1](y) if net.time == "day" else y, "time = 'day'"),
        (lambda net, y: net.named[net.time](y), "time = 'day'"),
        (lambda net, y: net.norms[0](y), ""),
    ],
)
def test_a_fold_names_the_attributes_that_it_depends_on(choose, says: str):
    net, x = shaken(LooksAtAttributes(choose)).eval(), torch.randn(2, 3, 8, 8)
    inner = nn.Sequential(net, nn.Flatten()).eval()
    for model, prefix in ((net, ""), (inner, "0.")):
        merged = merge(model, example_input=x)
        (row,) = [row for row in notes(merged).merging if row.error is not None]
        wanted = f"the forward looks at attributes: this holds while {prefix}{says}" if says else ""
        assert row.reason == wanted
        torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-4)
    assert type(net.domain) is int
    assert type(merged[0].domain) is int
