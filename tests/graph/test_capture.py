"""Networks as graphs: what is captured, for which sizes, and which layers may be replaced."""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

from lowrank_cnn.graph.capture import CaptureError, capture, layer_kind
from lowrank_cnn.graph.patterns import find_patterns
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
