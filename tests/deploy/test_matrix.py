import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.deploy.blocks import Epilogue
from lowrank_cnn.deploy.cpu_convs import MatrixConv2d
from lowrank_cnn.method.layers import CompositeConv2d

SIZES = st.integers(1, 5)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(SIZES, SIZES, st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([2, 40]),
    st.integers(1, 2),
    st.booleans(),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_any_composite_equals_its_matrix_products(groups, channels: int, dilation: int, bias: bool, size):
    layer = CompositeConv2d(channels, groups, dilation=dilation, bias=bias, dtype=torch.float64).eval()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    if not MatrixConv2d.takes(layer):
        return
    x = torch.randn(2, channels, *size, dtype=torch.float64)
    fast = MatrixConv2d(layer)
    torch.testing.assert_close(fast(x), layer(x), rtol=0, atol=1e-10)
    for ours, right in zip(fast.plain().layer.weights, layer.weights, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("kernel", [1, 3, (1, 5)])
def test_a_conv_with_what_follows_it(channels: int, kernel):
    conv = nn.Conv2d(channels, 6, kernel, padding="same").double()
    pool = nn.MaxPool2d(2)
    x = torch.randn(3, channels, 8, 10, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    fast = MatrixConv2d(conv, Epilogue("relu", pool))
    torch.testing.assert_close(fast(x), pool(conv(x).relu()))
    torch.testing.assert_close(fast.plain()(x), pool(conv(x).relu()))
    assert set(fast.float().state_dict()) == {"bias", *(f"matrix{i}" for i in range(len(fast.taps)))}


def test_every_odd_kernel_of_same_padding_is_taken():
    assert MatrixConv2d.takes(CompositeConv2d(4, [(3, 1, 2), (1, 5, 2), (3, 3, 1)], dilation=2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.ConvTranspose2d(4, 4, 1),
        nn.Linear(4, 4),
    ],
)
def test_other_layers_are_not_taken(layer: nn.Module):
    assert not MatrixConv2d.takes(layer)
    with pytest.raises(ValueError, match="stride one"):
        MatrixConv2d(layer)
