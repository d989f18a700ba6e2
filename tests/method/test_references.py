from functools import partial

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose


class Held(nn.Module):
    """Two convs, one of which runs by an attribute that `hold` makes."""

    def __init__(self, hold) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3)
        self.first = hold(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.first(x))


FUNCTIONS = {
    "conv in a closure": lambda net: (lambda conv: lambda x: conv(x))(net.a),
    "model in a closure": lambda net: lambda x: net.a(x),
    "default": lambda net: lambda x, conv=net.a: conv(x),
    "keyword": lambda net: lambda x, *, conv=net.a: conv(x),
}


@pytest.mark.parametrize("hold", FUNCTIONS)
def test_a_function_that_holds_modules_is_refused(hold: str):
    with pytest.raises(LowRankError, match=r"first is a function that holds modules.*make it a method"):
        convert(Held(FUNCTIONS[hold]), "lr-join", where="b", allow_costlier=True)


@pytest.mark.parametrize(
    ("hold", "changed"),
    [
        (lambda net: net.a.forward, ["b"]),
        (lambda net: partial(lambda conv, x: conv(x), net.a), ["a", "b"]),
        (lambda _net: lambda x: torch.tanh(x), ["a", "b"]),
    ],
)
def test_methods_partials_and_functions_without_modules_are_copied(hold, changed: list[str]):
    net = Held(hold).double()
    new = decompose(net, "separable(m=12)", allow_costlier=True)
    assert [row.name for row in notes(new).conversion.changed] == changed
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
