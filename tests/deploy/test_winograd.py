import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.deploy.block_forms import CANDIDATES
from lowrank_cnn.deploy.blocks import Epilogue, in_blocks
from lowrank_cnn.deploy.cpu_convs import WinogradConv2d
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv

KERNELS = st.sampled_from([(3, 1), (1, 3), (3, 3), (1, 1)])


@settings(max_examples=80)
@given(
    st.lists(st.tuples(KERNELS, st.integers(1, 4)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
)
def test_any_composite_of_three_taps_is_what_it_was(groups, bias: bool, images: int, size):
    groups = [(*kernel, filters) for kernel, filters in groups]
    layer = CompositeConv2d(32, groups, bias=bias, dtype=torch.float64).eval()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    if not WinogradConv2d.takes(layer):
        assert all(kernel[:2] == (1, 1) for kernel in groups)
        return
    x = torch.randn(images, 32, *size, dtype=torch.float64)
    fast = WinogradConv2d(layer)
    torch.testing.assert_close(fast(x), layer(x), rtol=0, atol=1e-10)
    again = fast.plain()
    assert isinstance(again.layer, CompositeConv2d)
    for ours, right in zip(again.layer.weights, layer.weights, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(again(x), layer(x), rtol=0, atol=1e-10)


def test_a_conv_with_what_follows_it():
    conv, pool = nn.Conv2d(32, 6, 3, padding=1).double(), nn.MaxPool2d(2)
    x = torch.randn(3, 32, 8, 10, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    fast = WinogradConv2d(conv, Epilogue("relu", pool))
    torch.testing.assert_close(fast(x), pool(conv(x).relu()))
    torch.testing.assert_close(fast.plain()(x), pool(conv(x).relu()))


def test_in_float32_it_stays_close():
    conv = nn.Conv2d(256, 64, (1, 3), padding=(0, 1))
    x = torch.randn(1, 256, 14, 14)
    exact = conv.double()(x.double()).detach()
    found = WinogradConv2d(conv.float())(x)
    assert torch.linalg.vector_norm(found - exact) < 5e-6 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("scheme", ["lr-join", "mixture(kx1=3, 1xk=3, kxk=2, join)", "lr"])
@pytest.mark.parametrize("name", ["minimal filtering", "merged, minimal filtering"])
def test_chains_are_filtered_apart_and_as_one(scheme: str, name: str):
    torch.manual_seed(0)
    net = nn.Sequential(build_conv(32, 32, 3, scheme), nn.ReLU(), nn.MaxPool2d(2)).double().eval()
    x = torch.randn(2, 32, 10, 6, dtype=torch.float64)
    for block in in_blocks(net, x)[1]:
        way = CANDIDATES[name](block)
        assert way is not None
        assert any(isinstance(part, WinogradConv2d) for part in way.modules())
        torch.testing.assert_close(way(x), net(x))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(32, 8, 3, padding=1, stride=2),
        nn.Conv2d(32, 8, 3),
        nn.Conv2d(32, 8, 5, padding=2),
        nn.Conv2d(32, 8, 3, padding=2, dilation=2),
        nn.Conv2d(32, 8, 3, padding=1, groups=2),
        nn.Conv2d(32, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(32, 8, 1),
        nn.Linear(3, 3),
    ],
)
def test_others_are_not_taken(conv: nn.Module):
    assert not WinogradConv2d.takes(conv)
    with pytest.raises(ValueError, match="three taps"):
        WinogradConv2d(conv)
