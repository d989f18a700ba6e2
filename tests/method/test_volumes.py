"""Composites and schemes over volumes (Conv3d), through the calls that users make."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lowrank_cnn as lr

SIZE = (3, 4, 16, 16)
STRIPS = [(3, 1, 1, 4), (1, 3, 1, 5), (1, 1, 3, 6)]


class Conv3DSimple(nn.Conv3d):
    """As in torchvision, which does not import everywhere."""

    def __init__(self, in_planes: int, out_planes: int, midplanes: int | None = None, stride: int = 1) -> None:
        super().__init__(in_planes, out_planes, 3, stride, 1, bias=False)


class Block(nn.Module):
    """Two convs and a residual, as in ResNet-3D; `flat` makes each conv a pair, as in R(2+1)D."""

    def __init__(self, channels: int, width: int, stride: int, *, flat: bool) -> None:
        super().__init__()
        self.conv1 = conv(channels, width, stride, flat=flat)
        self.conv2 = conv(width, width, 1, flat=flat)
        self.bn1, self.bn2, self.relu = nn.BatchNorm3d(width), nn.BatchNorm3d(width), nn.ReLU(inplace=True)
        self.down = nn.Conv3d(channels, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.down(x))


def conv(channels: int, width: int, stride: int, *, flat: bool) -> nn.Module:
    if not flat:
        return Conv3DSimple(channels, width, stride=stride)
    frames = nn.Conv3d(channels, width, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
    time = nn.Conv3d(width, width, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
    return nn.Sequential(frames, nn.BatchNorm3d(width), nn.ReLU(), time)


def network(*, flat: bool = False, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv3d(3, width, (3, 5, 5), (1, 2, 2), (1, 2, 2), bias=False), nn.BatchNorm3d(width), nn.ReLU()
    blocks = Block(width, width, 1, flat=flat), Block(width, 2 * width, 2, flat=flat)
    return settled(nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2 * width, 5)))


def settled(net: nn.Module) -> nn.Module:
    """With statistics of its own in every batch norm."""
    net.train()(volumes())
    return net.eval()


def volumes(count: int = 4) -> Tensor:
    return torch.randn(count, *SIZE, generator=torch.Generator().manual_seed(1))


def assert_same(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    assert torch.allclose(one, other, atol=tolerance * float(other.detach().abs().max()))


@pytest.mark.parametrize("stride", [1, 2, (2, 1, 3)])
@pytest.mark.parametrize("dilation", [1, (2, 1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_torch_convs_and_a_concatenation(stride: Any, dilation: Any, bias: bool):
    layer = lr.CompositeConv3d(3, STRIPS, stride=stride, dilation=dilation, bias=bias).double()
    x, steps = torch.randn(2, 3, 6, 9, 8, dtype=torch.float64), layer.dilation
    parts = []
    for axis, weight in enumerate(layer.weights):
        padding = [steps[axis] if own == axis else 0 for own in range(3)]
        parts.append(torch.conv3d(x, weight, None, stride, padding, dilation))
    right = torch.cat(parts, 1)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
        right = right + layer.bias[:, None, None, None]
    assert_same(layer(x), right, 1e-12)
    assert_same(layer.dense_view()(x), right, 1e-12)
    assert_same(layer(x[0]), right[0], 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": (0, 2, 1)},
        {"padding": ((2, 0), (1, 1), (0, 3))},
        {"padding": "valid", "stride": 2},
        {"padding_mode": "replicate"},
        {"channel_groups": 3, "shuffle": True},
    ],
)
@pytest.mark.parametrize("groups", [STRIPS, [(2, 1, 1, 3), (1, 4, 4, 3), (3, 3, 3, 6)]])  # even kernels, too
def test_any_geometry_equals_one_dense_conv(options: dict[str, Any], groups: Sequence[Any]):
    groups = [(*own, 3 * n) for *own, n in groups]
    layer = lr.CompositeConv3d(9, groups, **options).double()
    x = torch.randn(2, 9, 6, 9, 8, dtype=torch.float64)
    assert_same(layer.dense_view()(x), layer(x), 1e-12)


@pytest.mark.parametrize(
    ("scheme", "filters"),
    [
        ("lr", "3x1x1,24 + 1x3x1,24 + 1x1x3,16"),  # near thirds in eights, which the kernels need
        ("lr-join(m=30)", "3x1x1,10 + 1x3x1,10 + 1x1x3,10 -> 1x1x1,64"),
        ("2+1", "1x3x3,64 -> 3x1x1,64"),
        ("2+1(m=0.5)", "1x3x3,32 -> 3x1x1,64"),
        ("mixture(kx1x1, 1xkxk=3)", "3x1x1,16 + 1x3x3,48"),
    ],
)
def test_convert_rewrites_and_counts(scheme: str, filters: str):
    net = nn.Sequential(nn.Conv3d(8, 64, 3, 2, 1), nn.ReLU())
    low = lr.convert(net, scheme, input_size=(8, 4, 6, 6), allow_costlier=True)
    (change,) = lr.notes(low).conversion.changed
    assert (change.before, change.after) == ("3x3x3,64", filters)
    assert str(lr.parse_scheme(scheme)) == scheme
    assert low(torch.zeros(1, 8, 4, 6, 6)).shape == net(torch.zeros(1, 8, 4, 6, 6)).shape
    pixels, channels, macs = 2 * 3 * 3, 8, 0
    for stage in filters.split(" -> "):
        groups = [(own.split(",")[0].split("x"), int(own.split(",")[1])) for own in stage.split(" + ")]
        later = 2 if scheme.startswith("2+1") and stage.startswith("1x") else 1  # its stride in time comes later
        macs += later * pixels * channels * sum(prod(map(int, kernel)) * n for kernel, n in groups)
        channels = sum(n for _, n in groups)
    assert lr.count(low, (8, 4, 6, 6)).macs == macs


def test_every_filter_has_the_variance_of_its_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(64, 96, 3), nn.ReLU(), nn.Conv3d(96, 96, (3, 5, 5)), nn.ReLU())
    strips, pair = lr.convert(net, "lr"), lr.convert(net, "2+1")
    for weight in strips[0].weights:
        assert float(weight.std()) == pytest.approx(sqrt(2 / (3 * 96)), rel=0.02)
    first, second = pair[2]
    assert float(first.weight.std()) == pytest.approx(sqrt(1 / (25 * 96)), rel=0.02)
    assert float(second.weight.std()) == pytest.approx(sqrt(2 / (3 * 96)), rel=0.02)


@pytest.mark.parametrize("scheme", ["lr", "2+1", "lr-join"])
def test_a_network_is_converted_and_merged_back(scheme: str):
    low = settled(lr.convert(network(), scheme, input_size=SIZE))
    merged = lr.merge(low, chains=True)
    assert not [part for part in merged.modules() if isinstance(part, nn.BatchNorm3d | lr.FactoredConv2d)]
    assert_same(merged(volumes()), low(volumes()))


def test_budgets_and_thinner_networks():
    dense = lr.count(network(), SIZE)
    assert lr.count(lr.convert(network(), macs=0.5, input_size=SIZE), SIZE).macs <= dense.macs / 2
    assert lr.count(lr.decompose(network(), "2+1", params=0.6, input_size=SIZE), SIZE).params <= 0.6 * dense.params
    assert lr.count(lr.thin(network(), width=0.5, multiple=8, input_size=SIZE), SIZE).macs < dense.macs / 2


def test_trained_filters_are_split_into_frames_and_time():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv3d(6, 8, (3, 2, 5), stride=(2, 1, 1), padding=(1, 0, 2), groups=2)).double()
    x = torch.randn(2, 6, 5, 6, 7, dtype=torch.float64)
    exact = lr.decompose(dense, "2+1(m=48)", allow_costlier=True)
    assert_same(exact(x), dense(x), 1e-12)
    few = lr.decompose(dense, "2+1(m=8)", allow_costlier=True)
    (row,) = lr.notes(few).decomposition
    matrices = [part.permute(1, 3, 4, 0, 2).reshape(3 * 10, 4 * 3) for part in dense[0].weight.chunk(2)]
    values = torch.stack([torch.linalg.svdvals(matrix).square() for matrix in matrices])
    assert row.energy == pytest.approx(float(values[:, :4].sum() / values.sum()))
    smooth = x.cumsum(2).cumsum(3).cumsum(4)
    seen = lr.decompose(dense, "2+1(m=8)", images=smooth, allow_costlier=True)
    assert (seen(smooth) - dense(smooth)).norm() < 0.7 * (few(smooth) - dense(smooth)).norm()
    mixed = lr.decompose(dense, "mixture(kx1x1, kxkxk, join, m=48)", allow_costlier=True)
    assert_same(mixed(x), dense(x), 1e-12)


@pytest.mark.parametrize("to", ["net.pt2", pytest.param("net.onnx", marks=pytest.mark.slow), "net.safetensors"])
@pytest.mark.parametrize("scheme", ["lr", "2+1"])
def test_it_is_exported_and_loaded(scheme: str, to: str, tmp_path):
    low = settled(lr.convert(network(), scheme))
    lr.export(low, tmp_path / to, input_size=SIZE)
    how: dict[str, Any] = {"into": network()} if to.endswith("safetensors") else {"trusted": True}
    assert_same(lr.load(tmp_path / to, **how)(volumes()), low(volumes()))


@pytest.mark.parametrize("build", [lambda: lr.convert(network(), "lr"), lambda: network(flat=True)])
def test_optimize_gives_the_same_results(build):
    low = settled(build())
    ours = lr.optimize(low, volumes(), cache=False, budget=2)
    assert_same(ours(volumes()), low(volumes()))


@pytest.mark.parametrize("scheme", ["lr", "2+1", "lr-join"])
def test_tools_take_it(scheme: str):
    low = lr.convert(nn.Sequential(nn.Conv3d(8, 12, 3, padding=1), nn.ReLU()), scheme).eval()
    x = torch.randn(1, 8, 4, 6, 6)
    for tool in (fx.symbolic_trace, torch.jit.script, lambda net: torch.jit.trace(net, x)):
        assert_same(tool(low)(x), low(x))
    assert_same(torch.compile(low, backend="aot_eager", fullgraph=True)(x), low(x))
    assert_same(low.to(memory_format=torch.channels_last_3d)(x), low(x))


def alone(conv: nn.Module, scheme: str) -> nn.Module:
    return lr.convert(nn.Sequential(conv), scheme, where="0")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lr.CompositeConv3d(8, [(3, 1, 1, 4), (1, 3, 4)]), "as many sides each, unlike 3x1x1,4 . 1x3,4"),
        (lambda: lr.CompositeConv3d(8, [(3, 1, 4), (1, 3, 4)]), "has 3-D filters, not 3x1,4"),
        (lambda: lr.CompositeConv2d(8, [(3, 1, 1, 4)]), "has 2-D filters, not 3x1x1,4"),
        (lambda: lr.CompositeConv3d(8, [lr.FilterGroup(3, 1, 1, 8, depthwise=True)]), "have two sides, not"),
        (lambda: lr.CompositeConv3d(8, STRIPS, stride=(1, 2)), "a positive number or three of them"),
        (lambda: lr.CompositeConv3d(8, STRIPS, padding=(1, 2)), '"valid", a number or three'),
        (lambda: lr.CompositeConv3d(8, STRIPS)(torch.zeros(2, 8, 5)), "takes .N, 8, T, H, W., not an input"),
        (
            lambda: lr.CompositeConv3d(3, STRIPS, padding=0)(torch.zeros(2, 3, 2, 5, 5)),
            "that span 3x3x3 do not fit",
        ),
        (lambda: lr.parse_scheme("mixture(kx1x1, kx1)"), "as many sides each, unlike kx1x1 and kx1"),
        (lambda: lr.parse_scheme("2+1(1xkxk, 1xkx1)"), "two shapes along different axes"),
        (lambda: lr.build_conv(8, 8, 3, "2+1"), "2.1 is not for kernels of 2 sides"),
        (lambda: lr.build_conv(8, 8, (3, 3, 3), "separable"), "separable is not for kernels of 3 sides"),
        (
            lambda: alone(nn.Conv3d(8, 8, 3), "separable"),
            "the schemes lr, 2.1 and channel take it",
        ),
        (lambda: alone(nn.Conv2d(8, 8, 3), "2+1"), "not three-dimensional: the scheme channel takes it"),
        (lambda: alone(nn.Conv3d(8, 8, (1, 3, 3)), "lr"), "its kernel is 1x3x3"),
        (lambda: alone(nn.Conv3d(8, 8, 7, groups=8), "lr"), "it is depthwise"),
        (lambda: alone(nn.Conv3d(8, 2, 3), "lr"), "too few filters for the scheme lr"),
        (
            lambda: alone(nn.Conv3d(8, 8, 3), "mixture(kx1x1=100, 1xkx1, 1x1xk)"),
            "too few filters for the scheme mix",
        ),
    ],
)
def test_bad_layers_are_refused_in_a_sentence(make, says: str):
    with pytest.raises(lr.LowRankError, match=says):
        make()
