"""Networks as graphs: what is captured, for which sizes, and the patterns of layers that are found in it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.graph.capture import CaptureError, capture
from lowrank_cnn.graph.patterns import find_patterns, rewritten
from lowrank_cnn.kernels.problem import activate
from lowrank_cnn.models import create_model

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class LooksAtSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        batch, channels, *_ = y.shape
        return y.view(batch, -1) if len(x) > 1 and y.size(2) > 2 else y * channels


class LooksAtValues(LooksAtSizes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


class TakesANumber(LooksAtSizes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * x.max().item() if len(x) else x


def test_our_own_layers_stay_whole_and_networks_are_captured_for_every_size():
    captured = capture(create_model("nin-c3-lr", width=0.05, norm="batch").eval())
    assert captured.calls is None
    calls = [str(node.target) for node in captured.graph.nodes if node.op == "call_module"]
    place = calls.index("features.conv2_2")
    assert calls[place : place + 3] == ["features.conv2_2", "features.conv2_2_norm", "features.conv2_2_relu"]


def test_a_forward_that_looks_at_sizes_is_captured_for_the_example():
    net = LooksAtSizes().eval()
    with pytest.raises(CaptureError):
        capture(copy.deepcopy(net))
    captured = capture(copy.deepcopy(net), X)
    assert captured.calls == (((2, 4, 8, 8), torch.float32, "cpu"),)
    again = torch.fx.GraphModule(captured.root, captured.graph)
    assert torch.equal(again(X), net(X))


@pytest.mark.parametrize("kind", [LooksAtValues, TakesANumber])
def test_a_forward_that_looks_at_values_is_not_captured(kind: type[nn.Module]):
    with pytest.raises(CaptureError, match="cannot be traced"):
        capture(kind().eval(), X)


def test_a_network_with_hooks_is_not_captured():
    net = nn.Sequential(nn.Conv2d(4, 4, 3))
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks"):
        capture(net)


def test_what_is_added_in_place_is_recorded_so():
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            z = y
            y += 1
            y *= 2
            return y + z

    captured = capture(Adds())
    again = torch.fx.GraphModule(captured.root, captured.graph)
    assert torch.equal(again(X), Adds()(X))


class Net(nn.Module):
    """A few layers, called by a function given to it."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.silu, self.drop, self.same = nn.SiLU(), nn.Dropout(), nn.Identity()
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Joined(nn.Module):
    """A pattern, run by torch's own operations."""

    def __init__(self, layer: nn.Module, norm: nn.Module | None, activation, pool, add_last: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.activation, self.pool = layer, norm, activation, pool
        self.add_last = add_last

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x)
        y = y if self.norm is None else self.norm(y)
        y = y if residual is None or self.add_last else y + residual
        y = activate(y, self.activation)
        y = y + residual if residual is not None and self.add_last else y
        return y if self.pool is None else self.pool(y)


def joined(net: nn.Module) -> tuple[nn.Module, list[str]]:
    """A network whose patterns run as single modules, and the patterns in words."""
    captured = capture(copy.deepcopy(net))
    patterns = find_patterns(captured, norms=True)
    words = [
        " ".join(
            [pattern.name, *(["norm"] * (pattern.norm is not None))]
            + ["add"] * (pattern.add is not None and not pattern.add_last)
            + ([pattern.activation] if pattern.activation else [])
            + ["add"] * pattern.add_last
            + (["pool"] if pattern.pool is not None else [])
        )
        for pattern in patterns
    ]

    def make(pattern):
        norm = None if pattern.norm is None else captured.root.get_submodule(str(pattern.norm.target))
        layer = captured.root.get_submodule(pattern.name)
        return Joined(layer, norm, pattern.activation, pattern.pool, pattern.add_last).eval()

    return rewritten(captured, {pattern: make(pattern) for pattern in patterns}), words


def in_place_sum(s: Net, x: torch.Tensor) -> torch.Tensor:
    y = s.norm(s.conv(x))
    y += x
    return s.relu(y)


def sum_into_the_residual(s: Net, x: torch.Tensor) -> torch.Tensor:
    r = x * 1
    y = s.conv(x)
    r += y
    return r + s.other(r)


def residual_from_an_overwritten_input(s: Net, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    y = s.conv(x)
    return y + F.relu(x, inplace=True)


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda s, x: s.pool(s.relu(s.norm(s.conv(x)))), ["conv norm relu pool"]),
        (lambda s, x: F.max_pool2d(F.relu(s.conv(x)), 3, 2, 1), ["conv relu pool"]),
        (lambda s, x: F.max_pool2d(s.conv(x).relu(), kernel_size=2, ceil_mode=True), ["conv relu pool"]),
        (lambda s, x: F.max_pool2d(s.conv(x), 2, 2, 0, 1, True, False), ["conv pool"]),
        (lambda s, x: F.max_pool2d(s.conv(x), 2, return_indices=True)[0], ["conv"]),
        (lambda s, x: torch.max_pool2d(s.conv(x), 3, 2, 1, 1, True), ["conv pool"]),
        (lambda s, x: s.relu(s.pool(s.conv(x))), ["conv relu pool"]),
        (lambda s, x: s.silu(s.pool(s.conv(x))), ["conv pool"]),
        (lambda s, x: F.leaky_relu(s.conv(x), 0.1), ["conv leaky_relu:0.1"]),
        (lambda s, x: F.gelu(s.conv(x)), ["conv gelu"]),
        (lambda s, x: F.gelu(s.conv(x), approximate="tanh"), ["conv"]),
        (lambda s, x: F.hardswish(s.drop(s.same(s.conv(x)))), ["conv hardswish"]),
        (lambda s, x: s.relu(s.norm(s.conv(x)) + x), ["conv norm add relu"]),
        (lambda s, x: torch.add(x, s.conv(x)), ["conv add"]),
        (lambda s, x: torch.add(x, s.conv(x), alpha=2), ["conv"]),
        (lambda s, x: s.conv(x) + 1, ["conv"]),
        (lambda s, x: s.conv(x) + s.other(x), ["conv", "other add"]),
        (lambda s, x: (lambda y: y + y)(s.conv(x)), ["conv"]),
        (lambda s, x: s.relu(s.conv(x)) + x, ["conv relu add"]),
        (lambda s, x: x + s.silu(s.norm(s.conv(x))), ["conv norm silu add"]),
        (lambda s, x: s.pool(x + s.relu(s.conv(x))), ["conv relu add pool"]),
        (lambda s, x: s.silu(x + s.relu(s.conv(x))), ["conv relu add"]),
        (lambda s, x: s.relu(s.conv(x) + x) + x, ["conv add relu"]),
        (lambda s, x: F.relu(s.conv(x), inplace=True) + s.relu(s.other(x)), ["conv relu", "other relu add"]),
        (lambda s, x: s.pool(s.relu(s.conv(x))) + s.pool(x), ["conv relu pool"]),
        (lambda s, x: s.relu(s.other(s.relu(s.conv(x)))), ["conv relu", "other relu"]),
        (lambda s, x: (lambda y: s.relu(y * 1) + y)(s.conv(x)), ["conv"]),
        (lambda s, x: s.norm(s.conv(x)) + s.norm(x), ["conv"]),
        (in_place_sum, ["conv norm add relu"]),
        (sum_into_the_residual, ["conv", "other add"]),
        (residual_from_an_overwritten_input, ["conv"]),
        (lambda s, x: s.conv(x).view(x.size(0), -1), ["conv"]),
    ],
)
def test_patterns_are_found_and_compute_the_same(run, found: list[str]):
    net = Net(run).eval()
    nn.init.normal_(net.norm.running_mean)
    network, words = joined(net)
    assert words == found
    with torch.no_grad():
        torch.testing.assert_close(network(X.clone()), net(X.clone()))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(("place", "found"), [("relu", ["conv norm"]), ("norm", ["conv"]), ("conv", [])])
def test_what_has_hooks_is_in_no_pattern(hook: str, place: str, found: list[str]):
    net = Net(lambda s, x: s.pool(s.relu(s.norm(s.conv(x))))).eval()
    getattr(net.get_submodule(place), hook)(lambda *_: None)
    assert joined(net)[1] == found


def test_a_norm_that_no_layer_takes_begins_a_pattern():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU())
    found = find_patterns(capture(net), norms=True, kinds=("conv", "norm"))
    assert [(pattern.name, pattern.norm is not None, pattern.activation) for pattern in found] == [
        ("0", False, "relu"),
        ("2", True, "silu"),
    ]
    assert [pattern.name for pattern in find_patterns(capture(net), norms=True)] == ["2"]
