"""Hand-written residual networks whose convs, norms, sums, activations and pools are fused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import FusedNorm, NormedConv
from lowrank_cnn.kernels import forced
from lowrank_cnn.method.convert import convert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """As torchvision's BasicBlock: one ReLU module called twice, a sum in place."""

    def __init__(self, before: int, after: int, stride: int = 1, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = activation or nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.relu, self.maxpool = activation or nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        blocks = (Block(*sizes, activation=copy.copy(activation)) for sizes in ((16, 16), (16, 16), (16, 32, 2)))
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layers(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def network(**options) -> nn.Module:
    torch.manual_seed(0)
    net = Residual(**options)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return net.train()


def images(count: int = 2) -> Tensor:
    draw, size = torch.Generator().manual_seed(1), (23, 25) if DEVICE == "cuda" else (15, 17)
    return torch.randn(count, 3, *size, generator=draw).to(DEVICE).contiguous(memory_format=torch.channels_last)


def results(run: nn.Module, of: nn.Module, x: Tensor) -> list[Tensor]:
    y = run(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(of.parameters()))]


def test_every_norm_of_a_residual_network_is_fused():
    net = network()
    twin = fuse(net)
    norms = {name: part for name, part in twin.named_modules() if isinstance(part, FusedNorm)}
    assert len(norms) == sum(isinstance(part, nn.BatchNorm2d) for part in net.modules())
    assert [part.activation for part in norms.values()].count(None) == 1  # the norm of the shortcut
    assert [part.pool is not None for part in norms.values()].count(True) == 1
    assert sum(part.twice for part in norms.values()) == 2  # read by a block's conv and by its sum
    assert not any(isinstance(part, nn.BatchNorm2d | nn.ReLU | nn.MaxPool2d) for part in twin.modules())
    assert {id(p) for p in twin.parameters()} == {id(p) for p in net.parameters()}
    assert {id(b) for b in twin.buffers()} == {id(b) for b in net.buffers()}


def distance(found: Tensor, right: Tensor) -> float:
    return float(torch.linalg.vector_norm((found - right).detach()) / torch.linalg.vector_norm(right.detach()))


@pytest.mark.parametrize("scheme", [None, "lr", "lr-join"])
def test_the_copy_computes_the_same(scheme):
    net = network() if scheme is None else convert(network(), scheme)
    net = net.double().train()
    twin, x = fuse(net), images().cpu().double()
    assert any(isinstance(part, NormedConv) for part in twin.modules())
    before = copy.deepcopy(net.state_dict())
    right = results(net, net, x)
    moved = copy.deepcopy(net.state_dict())
    net.load_state_dict(before)
    assert all(torch.allclose(a, b) for a, b in zip(results(twin, net, x), right, strict=True))
    assert all(torch.allclose(net.state_dict()[name], value) for name, value in moved.items())


class Rounded(torch.autograd.Function):
    """A tensor with ten bits after the first, and its gradient so."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return Rounded.forward(None, slope)


class TenBits(TorchFunctionMode):
    """Torch's convs on operands of ten bits, as GPUs multiply float32, whichever conv their library takes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.conv2d, F.conv2d):
            args = (Rounded.apply(args[0]), Rounded.apply(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def assert_the_kernels_compute_the_same(net: nn.Module) -> None:
    """Compare the fused copy, run by the kernels in float32, with the network in float64.

    On a GPU the kernels' float32 products keep ten bits. A rounded input of a ReLU may change its sign, and a
    gradient appears or vanishes: the bounds there follow from the errors of torch's layers with such operands. A
    bias has few values, in which one change of sign is seen or not: it may be off as the worst parameter is.
    """
    net = net.to(DEVICE).train()
    exact, rival, x = copy.deepcopy(net).double(), copy.deepcopy(net), images(64 if DEVICE == "cuda" else 2)
    right = results(exact, exact, x.double())
    twin = fuse(net)
    with forced("on"):
        found = list(map(distance, results(twin, net, x), right))
    bounds = [1e-5] + [1e-4] * (len(right) - 1)
    if DEVICE == "cuda":
        with forced("off"), TenBits():
            result, *gradients = map(distance, results(rival, rival, x), right)
        bounds = [max(1e-3, 4 * result), *(max(1e-3, 4 * off, 2 * max(gradients)) for off in gradients)]
    names = ["the result", *(name for name, _ in net.named_parameters())]
    for name, off, bound in zip(names, found, bounds, strict=True):
        assert off <= bound, name
    for name, value in exact.named_buffers():
        assert torch.allclose(dict(net.named_buffers())[name].double(), value.double(), rtol=5e-3, atol=1e-3), name


def test_the_kernels_compute_the_same():
    pytest.importorskip("triton")
    assert_the_kernels_compute_the_same(convert(network(activation=nn.SiLU()), "lr"))


@pytest.mark.nightly
def test_the_kernels_pass_through_the_compiler():
    pytest.importorskip("triton")
    torch.compiler.reset()  # torch compiles a class, such as Sequential, so many times in a process and no more
    net, x = network().to(DEVICE), images(2)
    net.layers = net.layers[2:]  # one block, with its shortcut
    twin = fuse(net)
    with forced("on"):
        right = results(twin, net, x)
        found = results(torch.compile(twin, backend="aot_eager", fullgraph=True), net, x)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, right, strict=True))


class LooksAtValues(Residual):
    """A forward that no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() < 1e9 else -x)


def test_what_cannot_be_captured_is_fused_part_by_part():
    torch.manual_seed(0)
    net, said = LooksAtValues().double().train(), []
    twin, x = fuse(net, say=said.append), images().cpu().double()
    assert len(said) == 1
    assert said[0].startswith("Layers are fused one by one: ")
    assert type(twin) is LooksAtValues
    assert isinstance(twin.layers, torch.fx.GraphModule)
    assert sum(isinstance(part, NormedConv) for part in twin.modules()) == 7  # all convs of the blocks
    assert all(torch.allclose(a, b) for a, b in zip(results(twin, net, x), results(net, net, x), strict=True))


def test_a_norm_before_its_activation_is_fused_without_a_conv():
    """As in DenseNet and pre-activation ResNets: norm -> ReLU -> conv."""
    net = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double()
    twin, x = fuse(net), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    assert isinstance(twin.get_submodule("0"), FusedNorm)
    assert isinstance(twin.get_submodule("2"), NormedConv)
    assert all(torch.allclose(a, b) for a, b in zip(results(twin, net, x), results(net, net, x), strict=True))


class DarknetBlock(nn.Module):
    """As in Darknet and YOLO: the residual is added after the activation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.Conv2d(channels, channels // 2, 1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.LeakyReLU(0.1, True),
        )
        self.expand = nn.Sequential(
            nn.Conv2d(channels // 2, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.1, True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expand(self.squeeze(x))


def darknet() -> nn.Module:
    net = network()
    net.layers = nn.Sequential(DarknetBlock(16), DarknetBlock(16))
    net.fc = nn.Linear(16, 5)
    return net


def test_a_sum_after_the_activation_is_fused():
    net = darknet().double().train()
    twin, x = fuse(net), images().cpu().double()
    norms = [part for part in twin.modules() if isinstance(part, FusedNorm)]
    assert sum(part.add_last for part in norms) == 2
    assert (
        sum(part.twice for part in norms) == 1
    )  # the first block's result: read by the second's conv and its sum
    assert not any("add" in str(node.target) for node in twin.graph.nodes)
    assert all(torch.allclose(a, b) for a, b in zip(results(twin, net, x), results(net, net, x), strict=True))


def test_the_kernels_add_after_the_activation():
    pytest.importorskip("triton")
    assert_the_kernels_compute_the_same(convert(darknet(), "lr"))
