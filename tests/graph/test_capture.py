"""Networks as graphs: what is captured, for which sizes, and the patterns of layers that are found in it."""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from lowrank_cnn.graph.capture import CaptureError, capture, layer_kind
from lowrank_cnn.graph.patterns import find_patterns, rewritten
from lowrank_cnn.kernels.problem import activate
from lowrank_cnn.method.schemes import build_conv
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


class Parts(nn.Module):
    """A conv with what may follow it, called by a function given to it."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.conv, self.other, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.block, self.relu = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.ReLU()
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def hooked(net: Parts, name: str) -> Parts:
    net.get_submodule(name).register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize(
    ("net", "once"),
    [
        (Parts(lambda s, x: s.norm(s.conv(x))), {"conv", "norm"}),
        (Parts(lambda s, x: s.conv(s.conv(x))), set()),
        (Parts(lambda s, x: s.block(x) + s.block[0](x)), {"block.1"}),
        (hooked(Parts(lambda s, x: s.block(x) + s.block[0](x)), "block"), {"block"}),
        (Parts(lambda s, x: s.norm(s.conv(x)) * s.conv.weight.sum()), {"norm"}),
        (Parts(lambda s, x: s.norm(s.conv(x)) + s.norm.running_mean.sum()), {"conv"}),
    ],
)
def test_modules_that_may_be_replaced_are_called_once_and_read_by_nobody_else(net: nn.Module, once: set[str]):
    assert set(capture(net.eval()).called_once()) == once


def test_kinds_of_layers():
    named = nn.Conv2d(3, 4, 3)
    named.forward = lambda x: x
    hooks = nn.Conv2d(3, 4, 3)
    hooks.register_full_backward_pre_hook(lambda *_: None)
    empty = type("Own", (nn.Conv2d,), {})
    other = type("Other", (nn.Conv2d,), {"forward": lambda self, x: x})
    computed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    kinds = [
        (nn.Conv2d(3, 4, 3), "conv"), (nn.Conv1d(3, 4, 3), "conv"), (nn.Linear(3, 4), "linear"),
        (build_conv(4, 4, 3, "lr"), "composite"), (build_conv(4, 4, 3, "lr-join"), "chain"),
        (empty(3, 4, 3), "conv"),
        (other(3, 4, 3), None), (named, None), (hooks, None), (computed, None), (nn.ReLU(), None),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), None), (nn.ConvTranspose2d(3, 4, 3), "transposed conv"),
    ]  # fmt: skip
    assert [layer_kind(module) for module, _ in kinds] == [kind for _, kind in kinds]


def test_a_chain_with_a_hook_inside_is_no_layer():
    chain = build_conv(4, 4, 3, "lr-join")
    chain.join.register_forward_hook(lambda *_: None)
    assert layer_kind(chain) is None
    captured = capture(nn.Sequential(chain).eval())
    assert [pattern.name for pattern in find_patterns(captured)] == ["0.basis"]


@dataclass
class Answer(OrderedDict):
    """An output as Hugging Face's are: a dataclass that is a dictionary of what it holds."""

    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self) -> None:
        self.update({key: value for key, value in vars(self).items() if value is not None})


class TakesOptions(LooksAtSizes):
    def forward(self, x: torch.Tensor, hidden: bool | None = None, **options: object) -> Answer:
        if x.shape[1] != 4 or options:
            raise ValueError("four channels and no other options")
        first = self.conv(x)
        second = self.norm(first)
        return Answer(second, hidden=(first, second) if hidden else None)


def test_options_that_the_example_leaves_out_keep_their_defaults_and_outputs_their_class():
    net = TakesOptions().eval()
    captured = capture(copy.deepcopy(net), X)
    assert captured.calls == (((2, 4, 8, 8), torch.float32, "cpu"),)
    given, right = fx.GraphModule(captured.root, captured.graph)(X), net(X)
    assert type(given) is Answer
    assert given.keys() == right.keys() == {"logits"}
    torch.testing.assert_close(given["logits"], right["logits"])


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

    return rewritten(captured, patterns, make), words


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


def test_our_networks_have_a_pattern_per_layer():
    net = create_model("vgg11-gmp-lr", width=0.05).eval()
    _, words = joined(net)
    assert len(words) == 8
    assert words[0] == "features.conv1_1 relu pool"


def test_a_pattern_ends_where_it_is_not_accepted():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 1), nn.MaxPool2d(3))
    whole, second = find_patterns(capture(net))
    assert whole.activation == "relu"
    assert (whole.pool, second.pool) == (net[2], net[4])
    small = find_patterns(capture(net), accepts=lambda layer, parts: parts.get("pool") is not net[4])
    assert [pattern.pool for pattern in small] == [net[2], None]
    assert [len(pattern.nodes) for pattern in small] == [3, 1]


def test_a_norm_that_no_layer_takes_begins_a_pattern():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU())
    found = find_patterns(capture(net), norms=True, kinds=("conv", "norm"))
    assert [(pattern.name, pattern.norm is not None, pattern.activation) for pattern in found] == [
        ("0", False, "relu"),
        ("2", True, "silu"),
    ]
    assert [pattern.name for pattern in find_patterns(capture(net), norms=True)] == ["2"]
