"""What a scheme builds in the place of a dense conv."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.schemes import SCHEMES, FactoredConv2d, build_conv


@pytest.mark.parametrize("scheme", ["lr", "lr-join", "separable", "mixture(kx1=2, 1xk=1, kxk=1, join)"])
def test_outputs_see_the_inputs_of_their_own_channel_group_alone(scheme: str):
    layer = build_conv(16, 32, 3, scheme, channel_groups=4)
    x = torch.randn(1, 16, 6, 6, requires_grad=True)
    for index, outputs in enumerate(layer(x).chunk(4, dim=1)):
        (seen,) = torch.autograd.grad(outputs.abs().sum(), x, retain_graph=True)
        reached = [bool(part.any()) for part in seen.chunk(4, dim=1)]
        assert reached == [other == index for other in range(4)]


@pytest.mark.parametrize(
    "scheme", [*(name for name in SCHEMES if name != "learned"), "mixture(5x1, 1xk)", "mixture(1x1, 1xk, join)"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"padding": 0},
        {"dilation": 2, "padding": 2},
        {"stride": (1, 2), "padding": (0, 2)},
    ],
)
@pytest.mark.parametrize("kernel", [3, (3, 5)])
def test_a_replacement_gives_maps_of_the_dense_convs_size(scheme: str, options: dict, kernel: int):
    x = torch.randn(2, 6, 17, 19)
    dense = nn.Conv2d(6, 16, kernel, **{"padding": "same", **options})(x)
    replaced = build_conv(6, 16, kernel, scheme, **options)(x)
    assert replaced.shape[2:] == dense.shape[2:]
    assert replaced.shape[1] == (8 if scheme == "embed" else 16)


def test_a_chain_is_one_linear_map():
    chain = build_conv(3, 8, 3, "lr-join", bias=False).double()
    assert isinstance(chain, FactoredConv2d)
    assert [name for name, _ in chain.named_children()] == ["basis", "join"]
    x, y = torch.randn(2, 1, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(chain(2 * x - 3 * y), 2 * chain(x) - 3 * chain(y))


def test_a_separable_pair_is_the_product_of_its_halves():
    pair = build_conv(1, 1, 3, "separable", bias=False).double()
    kernel = pair.second.weight[0, 0] * pair.first.weight[0, 0]
    x = torch.randn(1, 1, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(pair(x), F.conv2d(x, kernel[None, None], padding=1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: build_conv(8, -4, 3, "lr-join"), "the number of filters must be a whole number of at least 1"),
        (lambda: build_conv(8, 8, 3, "lr", channel_groups=0), "channel_groups must be a whole number of"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        make()
