"""A chain of convs is one conv, to the last bit of float64, or the reason says why it is none."""

import pytest
import torch
from torch import nn

from lowrank_cnn.graph.merge import InexactError, merge_chain
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv


def chain(*layers: nn.Module) -> FactoredConv2d:
    made = build_conv(layers[0].in_channels, layers[-1].out_channels, 3, "separable")
    for name, layer in zip([name for name, _ in made.named_children()], layers, strict=True):
        setattr(made, name, layer)
    return made


@pytest.mark.parametrize("scheme", ["lr-join", "separable", "mixture(kx1, 1xk, kxk, join)"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_chain_is_one_conv(scheme: str, stride: int):
    layer = build_conv(4, 6, 3, scheme, stride=stride, bias=False).double()
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(merge_chain(layer)(x), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (nn.Conv2d(4, 4, (3, 1)), nn.Conv2d(4, 4, (3, 1)), "same axis"),
        (nn.Conv2d(4, 4, (3, 1), groups=2), nn.Conv2d(4, 4, (1, 3)), "channel groups"),
        (nn.Conv2d(4, 4, (3, 1)), nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), "bias meets the zero padding"),
        (
            nn.Conv2d(4, 4, (3, 1), padding=(1, 0), padding_mode="reflect", bias=False),
            nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False),
            "different ways",
        ),
    ],
)
def test_what_is_not_exact_says_why(first: nn.Module, second: nn.Module, says: str):
    with pytest.raises(InexactError, match=says):
        merge_chain(chain(first, second))
