"""Norms that also activate, as timm's: merged, fused, made thinner and trained like torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.compare import difference
from lowrank_cnn.deploy.blocks import in_blocks
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import NormedConv
from lowrank_cnn.graph.patterns import split_norm


class NormAct(nn.BatchNorm2d):
    """A norm that drops and activates, written out as timm writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return self.act(self.drop(x))


class ActNorm(NormAct):
    """The same parts in another order."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(self.act(input.clone()), self.running_mean, self.running_var, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 16, 1, bias=False), NormAct(16)
        self.conv2, self.bn2 = nn.Conv2d(16, channels, 3, padding=1, bias=False), NormAct(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)))) + x


def darknet() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), NormAct(32))
    net = nn.Sequential(stem, Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    for norm in (part for part in net.modules() if isinstance(part, NormAct)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
    return net


def test_such_a_norm_is_folded_into_its_conv() -> None:
    net = darknet().double().eval()
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    merged = lr.merge(net, example_input=x)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in merged.modules())
    assert difference(merged(x), net(x)) < 1e-12
    assert any(isinstance(part, NormAct) for part in net.modules()), "the user's network stays as it is"


def test_such_a_norm_is_fused_in_training_with_the_same_gradients() -> None:
    net = darknet().double().train()
    twin = copy.deepcopy(net)
    fused = fuse(twin)
    assert sum(isinstance(part, NormedConv) for part in fused.modules()) == 3
    x = torch.randn(4, 3, 9, 7, dtype=torch.float64)
    for network in (net, fused):
        network(x).square().sum().backward()
    expected = {name: part.grad for name, part in net.named_parameters()}
    assert difference({name: part.grad for name, part in twin.named_parameters()}, expected) < 1e-9
    assert difference(dict(twin.named_buffers()), dict(net.named_buffers())) < 1e-9


def test_a_network_with_such_norms_is_made_thinner_and_keeps_their_class() -> None:
    thin = lr.thin(darknet(), width=0.5, input_size=(3, 16, 16))
    norms = [part for part in thin.modules() if isinstance(part, NormAct)]
    assert [norm.num_features for norm in norms] == [16, 16, 16]
    assert thin(torch.randn(2, 3, 16, 16)).isfinite().all()


def test_the_residual_behind_such_a_norm_is_part_of_its_block() -> None:
    net, x = darknet().eval(), torch.randn(1, 3, 8, 8)
    _, blocks, _ = in_blocks(lr.merge(net, example_input=x), x)
    assert [str(block.epilogue) for block in blocks.values()] == [
        "leaky_relu:0.01",
        "leaky_relu:0.01",
        "leaky_relu:0.01 + add",
    ]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), ActNorm(4), nn.ReLU()])
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    assert split_norm(layer) is None


def test_a_norm_with_a_hook_is_left_alone() -> None:
    norm = NormAct(4)
    norm.register_forward_hook(lambda *_: None)
    assert split_norm(norm) is None
