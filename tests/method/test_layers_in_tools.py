"""Converted networks pass through the tools that people use: script, trace, quantise, inspect, compile."""

import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn import functional as F
from torch.nn.utils import prune

from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv
from lowrank_cnn.models import create_model

SCHEMES = ["lr", "lr-join", "separable", "mixture", "mixture(kx1=3, 1xk=3, kxk=2, join)"]
SCRIPTED = ["nin-c3-lr", "vgg11-gmp-lr-join", "vgg11-gmp-sf", "vgg11", "resnet18-small-lr", "airbench-lr"]
BRANCHED = ["lr(branches)", "lr-join(branches)", "dense(branches)"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(32, 16, 4, padding="same", bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 16, 16, 17, generator=torch.Generator().manual_seed(0))


QUICK = [(scheme, tool) for scheme in (*SCHEMES, *BRANCHED) for tool in ("script", "symbolic_trace", "trace")]
SLOW = [(scheme, tool) for scheme in ("lr-join", "lr(branches)") for tool in ("compile", "export")]


@pytest.mark.parametrize(("scheme", "tool"), QUICK + SLOW)
def test_a_converted_network_passes_through(scheme: str, tool: str, image: torch.Tensor):
    torch.manual_seed(0)
    net = convert(network(), scheme, allow_costlier=True).eval()
    tools = {
        "script": torch.jit.script,
        "symbolic_trace": torch.fx.symbolic_trace,
        "compile": lambda net: torch.compile(net, backend="eager", fullgraph=True),
        "trace": lambda net: torch.jit.trace(net, image),
        "export": lambda net: torch.export.export(net, (image,)).module(),
    }
    torch.compiler.reset()  # torch compiles a class, such as Sequential, so many times in a process and no more
    made = tools[tool](net)
    torch.testing.assert_close(made(image), net(image))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scripted_layer_trains_and_takes_an_image_without_its_batch(scheme: str, image: torch.Tensor):
    layer = build_conv(16, 8, 3, scheme, padding=1)
    scripted = torch.jit.script(layer)
    torch.testing.assert_close(scripted(image[0]), layer(image[0]))
    scripted(image).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("scheme", ["lr", "separable", "mixture(kx1=3, 1xk=3, kxk=2, join)", "lr-join(branches)"])
def test_fx_quantisation_reaches_the_filters(scheme: str, image: torch.Tensor):
    torch.manual_seed(0)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    try:
        plain = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3))
        net = convert(plain, scheme, allow_costlier=True).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(net, get_default_qconfig_mapping("qnnpack"), (image,))
            prepared(image)
            quantised = convert_fx(prepared)
        error = (quantised(image) - net(image)).norm() / net(image).norm()
    finally:
        torch.backends.quantized.engine = engine
    assert 0 < error < 0.1
    called = [str(node.target) for node in quantised.graph.nodes]
    assert any("quantized" in name or "quantize_per_tensor" in name for name in called)
    convs = [m for m in quantised.modules() if "quantized" in type(m).__module__ and "Conv" in type(m).__name__]
    assert len(convs) + sum("conv2d" in name for name in called) >= 2


@pytest.mark.parametrize("name", [*SCRIPTED, "googlenet-lr"])
def test_our_networks_are_traced_by_fx_and_scripted(name: str):
    net = create_model(name, width=0.05, num_classes=4, image_size=64).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(x), net(x))
    if name in SCRIPTED:
        torch.testing.assert_close(torch.jit.script(net)(x), net(x))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_shows_the_conv_that_it_stands_for(scheme: str, groups: int):
    layer = build_conv(4, 8, (3, 5), scheme, stride=(2, 1), padding="valid", channel_groups=groups, bias=False)
    layer = layer.double()
    assert (layer.in_channels, layer.out_channels) == (4, 8)
    assert (layer.kernel_size, layer.stride, layer.groups) == ((3, 5), (2, 1), groups)
    assert (layer.padding, layer.padding_mode, layer.dilation) == (((0, 0), (0, 0)), "zeros", (1, 1))
    assert layer.weight.shape == (8, 4 // groups, 3, 5)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    expected = F.conv2d(x, layer.weight, None, (2, 1), groups=groups)
    torch.testing.assert_close(layer(x), expected)
    layer.weight.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("scheme", [*SCHEMES, *BRANCHED])
def test_the_input_may_be_given_by_name(scheme: str):
    layer = build_conv(4, 8, 3, scheme).eval()
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(layer(input=x), layer(x))
    assert isinstance(layer, CompositeConv2d | FactoredConv2d | BranchedConv2d)


@pytest.mark.parametrize("scheme", [*SCHEMES, *BRANCHED, "channel", "cp"])
def test_a_layer_shows_its_padding(scheme: str):
    layer = build_conv(4, 8, (3, 5), scheme, padding=(1, 2), padding_mode="reflect")
    assert (layer.padding, layer.padding_mode) == (((1, 1), (2, 2)), "reflect")


def test_pruned_filters_stay_pruned_in_training():
    layer = build_conv(4, 8, 3, "lr")
    prune.l1_unstructured(layer.weights, "0", amount=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    before = layer.weights[0].detach().clone()
    for _ in range(2):
        layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
        optimizer.step()
    layer(torch.randn(2, 4, 6, 6))
    assert torch.equal(layer.weights[0] == 0, before == 0)
    assert not torch.equal(layer.weights[0], before)


def test_pruned_filters_with_branches_are_folded_as_they_are_now():
    layer = build_conv(4, 8, 3, "lr(branches)")
    prune.l1_unstructured(layer.strips.weights, "0", amount=0.5)
    prune.l1_unstructured(layer.point, "weight", amount=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.randn(2, 4, 6, 6)
    layer(x).square().mean().backward()
    optimizer.step()
    found = layer.eval()(x)
    torch.testing.assert_close(found, layer._by_branch(x))
