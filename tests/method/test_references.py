from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose


class Closure(nn.Module):
    """Two convs that run by `self.calls`, one of which `hold` keeps out of sight of a deep copy."""

    def __init__(self, hold) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3)
        self.first = hold(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.first(x))


HOLDS = {
    "conv in a closure": lambda net: (lambda conv: lambda x: conv(x))(net.a),
    "model in a closure": lambda net: lambda x: net.a(x),
    "default": lambda net: lambda x, conv=net.a: conv(x),
    "method": lambda net: net.a.forward,
    "partial": lambda net: partial(lambda conv, x: conv(x), net.a),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_a_conv_that_a_function_holds_stays(hold: str):
    net = Closure(HOLDS[hold]).double()
    if hold == "model in a closure":  # and with it every layer
        with pytest.raises(LowRankError, match="would go on calling the original"):
            decompose(net, "separable(m=12)")
        return
    new = decompose(net, "separable(m=12)", allow_costlier=True)
    changed = [row.name for row in notes(new).conversion.changed]
    assert changed == (["a", "b"] if hold == "partial" else ["b"])
    x = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x), rtol=1e-9, atol=1e-9)


class Picky(nn.Module):
    """Calls a conv as one of torch alone can be called, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.other(self.conv._conv_forward(x, self.conv.weight, None))


def test_a_network_that_fails_with_new_layers_is_refused_in_a_sentence():
    with pytest.raises(LowRankError, match=r"with its new layers the network fails: .*_conv_forward"):
        convert(Picky(), "lr", input_size=(4, 9, 9))
    convert(Picky(), "lr", input_size=(3, 9, 9))  # which the original does not take either


def test_the_trial_leaves_no_trace():
    before = torch.get_rng_state()
    torch.manual_seed(1)
    new = convert(Picky(), "lr", where="other", input_size=(4, 9, 9))
    after, _ = torch.randn(1), torch.manual_seed(1)
    convert(Picky(), "lr", where="other")
    assert new.calls == 0
    assert torch.equal(torch.randn(1), after)
    torch.set_rng_state(before)


GLOBAL = nn.Conv2d(4, 8, 3)


class ByGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = GLOBAL, nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(GLOBAL(x))


def test_a_network_that_calls_the_original_by_another_way_is_refused():
    with pytest.raises(LowRankError, match="still calls the original of conv"):
        convert(ByGlobal(), "lr", input_size=(4, 9, 9))
    assert notes(convert(ByGlobal(), "lr", where="other", input_size=(4, 9, 9))).conversion.changed


class ByFunction(nn.Module):
    """Its second conv is called by a function in an attribute, as a closure or by a default."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        ways = {
            "closure": (lambda conv: lambda x: conv(x))(self.second),
            "default": lambda x, conv=self.second: conv(x),
            "keyword": lambda x, *, conv=self.second: conv(x),
        }
        self.run = ways[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(torch.relu(self.first(x)))


@pytest.mark.parametrize("way", ["closure", "default", "keyword"])
def test_functions_of_a_copy_call_its_own_layers(way: str, tmp_path: Path):
    """The copy's layer would neither learn nor be what its file is loaded into."""
    net, x = ByFunction(way), torch.randn(1, 3, 8, 8)
    new = convert(net, "lr-join", where="first", allow_costlier=True)
    new(x).sum().backward()
    assert new.second.weight.grad is not None
    assert net.second.weight.grad is None
    export(net, tmp_path / "net.safetensors")
    loaded = load(tmp_path / "net.safetensors", into=ByFunction(way))
    torch.testing.assert_close(loaded(x), net(x))
