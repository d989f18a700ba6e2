from functools import partial

import pytest
import torch
from torch import nn

from lowrank_cnn.method.converting import convert
from lowrank_cnn.method.decomposing import decompose
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes


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
