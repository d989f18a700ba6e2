"""Convs that become one, and batch norms that fold into filters, to the last bits of float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.graph.merge import (
    InexactError,
    affine_bias,
    compose_bias,
    merge_chain,
    norm_affine,
    scale_filters,
    scale_transposed_filters,
)
from lowrank_cnn.kernels.reference import compose
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"), [((3, 3), (1, 1)), ((1, 5), (3, 1)), ((4, 1), (1, 2)), ((1, 1), (3, 3)), ((1, 1), (1, 1))]
)
def test_two_convs_are_one(first: tuple[int, int], second: tuple[int, int], groups: int):
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    a = torch.randn(6, 4 // groups, *first, dtype=torch.float64)
    b = torch.randn(8, 6 // groups, *second, dtype=torch.float64)
    bias_a, bias_b = torch.randn(6, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    chain = F.conv2d(F.conv2d(x, a, bias_a, groups=groups), b, bias_b, groups=groups)
    weight = compose(a, b, groups=groups)
    bias = compose_bias(bias_a, b, bias_b, groups=groups)
    assert_equal(F.conv2d(x, weight, bias, groups=groups), chain)
    assert_equal(compose_bias(bias_a, b, None, groups=groups), bias - bias_b)
    assert compose_bias(None, b, bias_b) is bias_b


def test_two_convs_along_one_axis_are_refused():
    with pytest.raises(ValueError, match="one axis"):
        compose(torch.randn(2, 2, 3, 1), torch.randn(2, 2, 3, 3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_batch_norm_folds_into_the_filters(affine: bool, biased: bool):
    norm = nn.BatchNorm2d(5, affine=affine, dtype=torch.float64).eval()
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    conv = nn.Conv2d(3, 5, 3, bias=biased, dtype=torch.float64)
    scale, shift = norm_affine(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    folded = F.conv2d(x, scale_filters(conv.weight, scale), affine_bias(conv.bias, scale, shift))
    assert_equal(folded, norm(conv(x)))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_filters_of_a_transposed_conv_are_scaled_group_by_group(groups: int):
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    weight, scale = torch.randn(4, 8 // groups, 3, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    scaled = F.conv_transpose2d(x, scale_transposed_filters(weight, scale, groups), groups=groups)
    assert_equal(scaled, F.conv_transpose2d(x, weight, groups=groups) * scale.reshape(-1, 1, 1))


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
