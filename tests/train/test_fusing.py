"""Hand-written networks whose convs, norms, sums, activations and pools are fused for training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.modules import FusedNorm, FusedPool, NormedConv
from lowrank_cnn.method.converting import convert
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, Record, fit
from lowrank_cnn.train.fusing import fused_by_graph, fused_to_train
from lowrank_cnn.train.job import Job

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """As torchvision's BasicBlock: one ReLU module called twice, a sum in place."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
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
        self.layers = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 32, 2))
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


def images(count: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 31, 33, generator=draw).to(DEVICE).contiguous(memory_format=torch.channels_last)


def results(run: nn.Module, of: nn.Module, x: Tensor) -> list[Tensor]:
    y = run(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(of.parameters()))]


def test_every_norm_of_a_residual_network_is_fused():
    net = network()
    twin = fused_by_graph(net)
    assert twin is not None
    norms = {name: part for name, part in twin.named_modules() if isinstance(part, FusedNorm)}
    assert len(norms) == sum(isinstance(part, nn.BatchNorm2d) for part in net.modules())
    assert [part.activation for part in norms.values()].count(None) == 1  # the norm of the shortcut
    assert [part.pool is not None for part in norms.values()].count(True) == 1
    assert sum(part.twice for part in norms.values()) == 2  # read by a block's conv and by its sum
    assert not any(isinstance(part, nn.BatchNorm2d | nn.ReLU | nn.MaxPool2d) for part in twin.modules())
    assert {id(p) for p in twin.parameters()} == {id(p) for p in net.parameters()}
    assert {id(b) for b in twin.buffers()} == {id(b) for b in net.buffers()}


@pytest.mark.parametrize("scheme", [None, "lr", "lr-join"])
def test_the_copy_computes_the_same(scheme):
    net = network() if scheme is None else convert(network(), scheme)
    net = net.double().train()
    twin, x = fused_by_graph(net), images().cpu().double()
    assert any(isinstance(part, NormedConv) for part in twin.modules())
    before = copy.deepcopy(net.state_dict())
    right = results(net, net, x)
    moved = copy.deepcopy(net.state_dict())
    net.load_state_dict(before)
    assert all(torch.allclose(a, b) for a, b in zip(results(twin, net, x), right, strict=True))
    assert all(torch.allclose(net.state_dict()[name], value) for name, value in moved.items())


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.GELU, lambda: nn.LeakyReLU(0.1)])
def test_the_kernels_compute_the_same(kind):
    pytest.importorskip("triton")
    net = convert(network(activation=kind()), "lr").to(DEVICE).train()
    exact, x = copy.deepcopy(net).double(), images()
    right = results(exact, exact, x.double())
    twin = fused_by_graph(net)
    with forced("on"):
        found = results(twin, net, x)
    for a, b in zip(found, right, strict=True):
        assert torch.linalg.vector_norm(a - b) <= 2e-2 * torch.linalg.vector_norm(b)
    for name, value in exact.named_buffers():
        assert torch.allclose(dict(net.named_buffers())[name].double(), value.double(), rtol=1e-3, atol=1e-4), name


def test_the_kernels_pass_through_the_compiler():
    pytest.importorskip("triton")
    net, x = network().to(DEVICE), images(2)
    twin = fused_by_graph(net)
    with forced("on"):
        right = results(twin, net, x)
        found = results(torch.compile(twin, backend="aot_eager", fullgraph=True), net, x)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, right, strict=True))


def test_training_takes_the_fused_copy():
    net, said = network(), []
    twin = fused_to_train(net, (3, 32, 32), said.append)
    assert not said
    assert any(isinstance(part, FusedPool) for part in twin.modules())
    assert net.training
    assert not any(isinstance(part, NormedConv) for part in net.modules())


class Branches(Residual):
    """A forward that looks at values, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() < 1e9 else -x)


def test_what_cannot_be_captured_is_fused_by_its_modules():
    torch.manual_seed(0)
    said: list[str] = []
    twin = fused_to_train(Branches(), (3, 32, 32), said.append)
    assert len(said) == 1
    assert said[0].startswith("Convs and norms are not fused: ")
    assert not any(isinstance(part, NormedConv) for part in twin.modules())
    assert any(isinstance(part, FusedPool) for part in twin.modules())


class Forgets(Residual):
    """Reads a norm's weight besides calling the norm: a fused layer could lose part of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bn1.weight.sum()


def test_a_norm_whose_weight_is_read_elsewhere_still_learns_all():
    torch.manual_seed(0)
    net, x = Forgets(), images().cpu()
    found, right = (results(part, net, x) for part in (fused_to_train(net, (3, 32, 32), pytest.fail), net))
    assert all((a - b).norm() <= 1e-4 * b.norm() for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", ["nin-c3-lr", "vgg11-gmp-lr-join", "googlenet-lr"])
def test_a_network_is_fused_and_shares_all_it_learns(name):
    network = create_model(name, num_classes=5, width=0.1, norm="batch").train()
    modes = [module.training for module in network.modules()]
    said: list[str] = []
    twin = fused_to_train(network, (3, 64, 64), said.append)
    assert not said
    assert twin is not network
    assert {id(p) for p in twin.parameters()} == {id(p) for p in network.parameters()}
    assert [module.training for module in network.modules()] == modes


class ReadsItsConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.conv(x) * self.conv.weight.norm()).mean(dim=(2, 3)))


class TurnsAround(nn.Sequential):
    """A Sequential by its class, but not by its order."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 5, 1), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(5, 5, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block[0](-self.block[1](self[0](x))).mean(dim=(2, 3))


@pytest.mark.parametrize("make", [ReadsItsConv, TurnsAround])
def test_a_network_that_fusing_would_change_stays_as_it_is(make):
    network, said = make(), []
    assert fused_to_train(network, (3, 8, 8), said.append) is network
    assert len(said) == 1
    assert "not fused" in said[0]


class NotANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean(dim=(2, 3)) * (1.0 if isinstance(self.conv, nn.Conv2d) else float("nan"))


class ReadsItsConvInTraining(ReadsItsConv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.head(self.conv(x).mean(dim=(2, 3)))


@pytest.mark.parametrize("make", [NotANumber, ReadsItsConvInTraining])
def test_neither_numbers_that_are_none_nor_training_alone_are_overlooked(make):
    network, said = make(), []
    assert fused_to_train(network, (3, 8, 8), said.append) is network
    assert len(said) == 1


def test_the_look_leaves_no_trace():
    network = create_model("googlenet-lr", num_classes=5, width=0.1, norm="batch").eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    drawn = torch.get_rng_state()
    assert fused_to_train(network, (3, 64, 64), pytest.fail) is not network
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def whole_run(name: str, monkeypatch: pytest.MonkeyPatch, *, fused: bool, **options) -> tuple[nn.Module, Record]:
    """A short run with dropout, batch norm and a moving average, its layers fused as they would be on a GPU."""
    place = Job.laid_out

    def fusing(job: Job, size: tuple[int, int, int]) -> nn.Module:
        placed = place(job, size)
        return fused_to_train(placed, size, pytest.fail) if fused else placed

    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (48, 3, 16, 16), generator=draw, dtype=torch.uint8)
    split = ResidentSplit.of(images, torch.arange(48) % 4)
    recipe = Recipe(batch_size=16, epochs=2, lr=0.05, ema=0.9, dropout=0.25, norm="batch")
    torch.manual_seed(1)
    network = create_model(name, num_classes=4, width=0.1, norm="batch", stride=1)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "laid_out", fusing)
        record = fit(
            network, Data("noise", tuple("abcd"), split, split), recipe, progress=False, device="cpu", **options
        )
    return network, record


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["nin-c3-lr", "googlenet-lr", "vgg11-gmp-lr-join"])
def test_a_run_with_fused_layers_is_the_run_without(name, options, monkeypatch):
    plain, one = whole_run(name, monkeypatch, fused=False)
    fused, other = whole_run(name, monkeypatch, fused=True, **options)
    assert list(plain.state_dict()) == list(fused.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert other.result["loss"] == pytest.approx(one.result["loss"], rel=1e-3)
    assert [row["accuracy"] for row in other.history] == [row["accuracy"] for row in one.history]
