"""Composites of depthwise filters and the scheme `bands`, through the calls that users make."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.blocks import in_blocks
from lowrank_cnn.kernels import forced
from lowrank_cnn.method.prune import cheaper


def depthwise(*sizes: int) -> lr.FilterGroup:
    return lr.FilterGroup(*sizes, depthwise=True)


class Block(nn.Module):
    """ConvNeXt's block, with a batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.up, self.act, self.down = nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(self.mix(x)))))


def network(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, width, 2, stride=2)
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))
    return nn.Sequential(stem, Block(width), Block(width), *ends).eval()


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stride", [1, 2])
def test_it_equals_a_split_convs_and_a_concatenation(stride: int):
    groups = [depthwise(5), depthwise(3, 3, 4), depthwise(1, 11, 3), depthwise(11, 1, 6)]
    layer = lr.CompositeConv2d(18, groups, stride=stride, padding=5).double()
    x = torch.randn(2, 18, 13, 12, dtype=torch.float64)
    square, across, down = layer.weights
    passed, first, second, third = x.split([5, 4, 3, 6], 1)
    parts = [
        passed[:, :, ::stride, ::stride],
        torch.conv2d(first, square, stride=stride, padding=1, groups=4),
        torch.conv2d(second, across, stride=stride, padding=(0, 5), groups=3),
        torch.conv2d(third, down, stride=stride, padding=(5, 0), groups=6),
    ]
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    assert torch.allclose(layer(x), torch.cat(parts, 1) + layer.bias[:, None, None], atol=1e-12)
    single = layer.dense_view()
    assert isinstance(single, nn.Conv2d)
    assert (single.kernel_size, single.groups) == ((11, 11), 18)
    assert torch.allclose(single(x), layer(x), atol=1e-12)
    assert torch.allclose(layer.with_points()(x), layer(x), atol=1e-12)


@pytest.mark.parametrize(
    ("scheme", "bands"),
    [
        ("bands", "identity,20 + depthwise 3x3,4 + depthwise 1x11,4 + depthwise 11x1,4"),
        ("bands(identity=2, 1x7, 7x1)", "identity,16 + depthwise 1x7,8 + depthwise 7x1,8"),
        ("lr", "depthwise 7x1,16 + depthwise 1x7,16"),
    ],
)
def test_convert_replaces_large_depthwise_kernels(scheme: str, bands: str, image: torch.Tensor):
    net = network()
    low = lr.convert(net, scheme, where="*.mix")
    assert isinstance(low.get_submodule("1.mix"), lr.CompositeConv2d)
    assert str(low.get_submodule("1.mix").composite) == bands
    assert str(lr.parse_scheme(scheme)) == scheme
    assert low(image).shape == (2, 5)
    taps = sum(group.taps * group.filters for group in low.get_submodule("1.mix").composite.groups)  # type: ignore[union-attr]
    saved = 2 * 16 * 16 * (49 * 32 - taps)
    assert lr.count(net, (3, 32, 32)).macs - lr.count(low, (3, 32, 32)).macs == saved


def test_bands_take_depthwise_layers_alone_and_their_kernels_are_known(recwarn):
    low = lr.convert(network(), "bands")
    assert not recwarn.list
    kinds = {name for name, module in low.named_modules() if isinstance(module, lr.CompositeConv2d)}
    assert kinds == {"1.mix", "2.mix"}


def test_they_are_drawn_with_the_variance_of_their_own_taps():
    torch.manual_seed(0)
    layer = lr.CompositeConv2d(4000, [depthwise(3, 3, 2000), depthwise(1, 11, 2000)])
    net = lr.init_(nn.Sequential(layer, nn.ReLU()))
    for drawn in (lr.CompositeConv2d(4000, layer.composite), net[0]):
        for weight, taps in zip(drawn.weights, (9, 11), strict=True):
            assert weight.std().item() == pytest.approx((2 / taps) ** 0.5, rel=0.03)


def test_trained_filters_are_fitted_by_the_taps_that_bands_have(image: torch.Tensor):
    net = network()
    low = lr.decompose(net, "bands(identity=1, 1x7, 7x1, 3x3, 7x7)")
    before, after = net.get_submodule("1.mix"), low.get_submodule("1.mix")
    assert isinstance(before, nn.Conv2d)
    assert isinstance(after, lr.CompositeConv2d)
    sizes = [group.filters for group in after.composite.groups]
    begins = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    assert begins[-1] == 32
    across, down, square, whole = after.weights
    assert torch.equal(across, before.weight[begins[1] : begins[2], :, 3:4])
    assert torch.equal(down, before.weight[begins[2] : begins[3], :, :, 3:4])
    assert torch.equal(square, before.weight[begins[3] : begins[4], :, 2:5, 2:5])
    assert torch.equal(whole, before.weight[begins[4] :])
    assert torch.equal(after.bias, before.bias)
    kept = sum(float(own.square().sum()) for own in after.weights) / float(before.weight.square().sum())
    assert lr.notes(low).decomposition[0].energy == pytest.approx(kept, rel=1e-5)
    exact = lr.decompose(net, "bands(7x7)", allow_costlier=True)
    assert torch.allclose(exact(image), net(image), atol=1e-5)
    with pytest.raises(LowRankError, match="mixes nothing"):
        lr.decompose(net, "bands", macs=0.5)


def test_a_convnext_of_transformers_is_converted_and_fused():
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[16, 32], num_stages=2, image_size=32)
    net = transformers.ConvNextForImageClassification(config).eval()
    low, x = lr.convert(net, "bands"), torch.randn(1, 3, 32, 32)
    names = [change.name for change in lr.notes(low).conversion.changed]
    assert names == [f"convnext.encoder.stages.{stage}.layers.0.dwconv" for stage in range(2)]
    with forced("on"):
        network, found, _ = in_blocks(low, x)
    epilogues = [str(block.epilogue) for name, block in found.items() if ".layers." in name]
    assert epilogues == ["", "gelu", "add"] * 2
    torch.testing.assert_close(network(x).logits, low(x).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "to", [pytest.param("network.onnx", marks=pytest.mark.nightly), "network.pt2", "network.ts", "network.param"]
)
def test_they_are_exported(to: str, image: torch.Tensor, tmp_path):
    if to.endswith(".param"):
        pytest.importorskip("pnnx")
    low = lr.convert(network(), "bands").eval()
    lr.export(low, tmp_path / to, example_input=image)  # which compares the file with the network
    assert (tmp_path / to).stat().st_size > 2_000


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lr.CompositeConv2d(8, [depthwise(3, 3, 4), (3, 1, 4)]), "all depthwise or none is"),
        (lambda: lr.CompositeConv2d(9, [depthwise(3, 3, 8)]), "as many as the channels that they see"),
        (lambda: lr.CompositeConv2d(8, [depthwise(3, 3, 3, 8)]), "has 2-D filters, not depthwise 3x3x3,8"),
        (lambda: lr.parse_scheme("bands(1x10)"), "1x10 needs odd sides"),
        (lambda: lr.parse_scheme("bands(identity=-1)"), "must be positive"),
        (lambda: lr.parse_scheme("lr(identity)"), "a filter shape is written like"),
        (lambda: lr.build_conv(6, 6, 7, "bands", channel_groups=6), "6 channels leave a band of bands empty"),
        (lambda: lr.build_conv(8, 8, 7, "bands"), "is for depthwise convolutions"),
        (lambda: lr.convert(nn.Conv2d(8, 8, 3), "bands", where="*"), "it is not depthwise"),
        (lambda: lr.convert(nn.Conv2d(16, 16, 8, groups=16), "bands"), "its kernel is even"),
        (lambda: lr.convert(nn.Conv2d(4, 4, 7, groups=4), "bands"), "4 channels leave a band of bands empty"),
    ],
)  # fmt: skip
def test_bad_bands_are_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        make()


def test_trained_filters_begin_as_bands_where_a_command_makes_a_network_cheaper():
    net = nn.Sequential(nn.Conv2d(16, 16, 7, padding=3, groups=16))
    new = cheaper(net, scheme="bands", input_size=(16, 12, 12), pretrained=True)
    torch.testing.assert_close(new[0].weights[0], net[0].weight[10:12, :, 2:5, 2:5])  # behind ten that pass
