"""The network that trains on a GPU is the user's own, fused or as it is."""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.modules import checked_size
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, Record, fit
from lowrank_cnn.train.loop import Trainer, running_network
from lowrank_cnn.train.step import fused_to_train
from tests.support import assert_equal_weights


@pytest.mark.parametrize("name", ["nin-c3-lr", "vgg11-gmp-lr-join", "googlenet-lr"])
@pytest.mark.parametrize("training", [True, False])
def test_the_twin_shares_all_it_learns_and_the_look_leaves_no_trace(name, training):
    network = create_model(name, num_classes=5, width=0.1, norm="batch").train(training)
    parts = [(type(module), module.training) for module in network.modules()]
    before, drawn = {name: tensor.clone() for name, tensor in network.state_dict().items()}, torch.get_rng_state()
    twin = fused_to_train(network, (3, 64, 64), pytest.fail)
    assert twin is not network
    assert {type(part).__name__ for part in twin.modules()} >= {"NormedConv", "FusedPool"}
    assert {id(p) for p in twin.parameters()} == {id(p) for p in network.parameters()}
    assert [(type(module), module.training) for module in network.modules()] == parts
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_equal_weights(network, before)


class ReadsItsConv(nn.Module):
    """Reads its conv's weight, after a branch on values that keeps its graph from being captured."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.mean() < 1e9 else -x
        return self.head((self.conv(x) * self.conv.weight.norm()).mean(dim=(2, 3)))


class TurnsAround(nn.Sequential):
    """A Sequential by its class, but not by its order."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 5, 1), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(5, 5, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.mean() < 1e9 else -x
        return self.block[0](-self.block[1](self[0](x))).mean(dim=(2, 3))


class NotANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.mean() < 1e9 else -x
        return self.conv(x).mean(dim=(2, 3)) * (1.0 if isinstance(self.conv, nn.Conv2d) else float("nan"))


class ReadsItsConvInTraining(ReadsItsConv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.head(self.conv(x).mean(dim=(2, 3)))


@pytest.mark.parametrize("make", [ReadsItsConv, TurnsAround, NotANumber, ReadsItsConvInTraining])
def test_a_network_that_fusing_would_change_stays_as_it_is(make):
    network, said = make(), []
    assert fused_to_train(network, (3, 8, 8), said.append) is network
    assert len(said) == 2
    assert said[0].startswith("Layers are fused one by one: ")
    assert said[1].startswith("Layers are not fused: ")


def whole_run(name: str, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> tuple[nn.Module, Record]:
    """A short run with dropout, batch norm and a moving average, its layers fused as they would be on a GPU."""

    def fusing(trainer: Trainer, say) -> nn.Module:
        size = checked_size(trainer.inputs.size)
        placed = running_network(trainer, say)
        return fused_to_train(trainer.network, size, pytest.fail) if fused else placed

    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (48, 3, 16, 16), generator=draw, dtype=torch.uint8)
    split = ResidentSplit.of(images, torch.arange(48) % 4)
    recipe = Recipe(batch_size=16, epochs=2, lr=0.05, ema=0.9, dropout=0.25, norm="batch")
    torch.manual_seed(1)
    network = create_model(name, num_classes=4, width=0.1, norm="batch", stride=1)
    with monkeypatch.context() as patch:
        patch.setattr(import_module("lowrank_cnn.train.loop"), "running_network", fusing)
        record = fit(network, Data("noise", tuple("abcd"), split, split), recipe, progress=False, device="cpu")
    return network, record


RUNS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("vgg11-gmp-lr-join", "googlenet-lr")]


@pytest.mark.parametrize("name", ["nin-c3-lr", *RUNS])
def test_a_run_with_fused_layers_is_the_run_without(name, monkeypatch):
    plain, one = whole_run(name, monkeypatch, fused=False)
    fused, other = whole_run(name, monkeypatch, fused=True)
    assert list(plain.state_dict()) == list(fused.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert other.result["loss"] == pytest.approx(one.result["loss"], rel=1e-3)
    assert [row["accuracy"] for row in other.history] == [row["accuracy"] for row in one.history]


class ReadsItsNorm(nn.Module):
    """Reads a norm's weight besides calling the norm: a fused layer could lose part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.norm(self.conv(x)).relu())
        return x.mean(dim=(2, 3)) * self.norm.weight.sum()


def test_a_norm_whose_weight_is_read_elsewhere_gets_its_whole_gradient():
    torch.manual_seed(0)
    net, x = ReadsItsNorm().double(), torch.randn(3, 3, 9, 8, dtype=torch.float64)
    twin = fused_to_train(net.float(), (3, 9, 8), pytest.fail)
    net.double()
    found, right = (torch.autograd.grad(run(x).square().sum(), list(net.parameters())) for run in (twin, net))
    assert all(torch.allclose(a, b) for a, b in zip(found, right, strict=True))
