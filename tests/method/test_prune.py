"""Pruning: a thinner network with the weights of the trained one."""

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowrank_cnn as lr

SIZE = (3, 32, 32)


def conv(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Mixed(nn.Module):
    """A residual sum, a concatenation, a grouped and a depthwise conv, a scale and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = conv(3, 32), conv(32, 48), conv(48, 32)
        self.scale = nn.Parameter(torch.rand(1, 32, 1, 1) + 0.5)
        self.side = conv(32, 16, 1)
        self.depthwise, self.grouped = conv(48, 48, 3, 48), nn.Sequential(conv(48, 48, 1), conv(48, 48, 3, 4))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(48, 48, 1), nn.Sigmoid())
        self.head = nn.Linear(48 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.scale * self.outer(self.inner(x))
        x = self.grouped(self.depthwise(torch.cat([x, self.side(x)], 1)))
        x = nn.functional.adaptive_avg_pool2d(x * self.gate(x), 2)
        return self.head(x.flatten(1))


class ConvNext(nn.Module):
    """Large depthwise kernels, layer norms over channels that are last, linear layers and a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.depthwise, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.gamma = nn.Parameter(torch.full((32,), 0.1))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(nn.functional.gelu(self.wide(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


def vgg() -> nn.Module:
    return nn.Sequential(conv(3, 32), nn.MaxPool2d(4), conv(32, 64), nn.Flatten(), nn.Linear(64 * 64, 10))


def pytorchcv_resnet() -> nn.Module:
    return pytest.importorskip("pytorchcv.models.resnet_cifar").resnet20_cifar10()


def kill(net: nn.Module) -> None:
    """Make every second channel of the inner layers dead, and everything that reads it blind to it."""
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2.0)
            for tensor in (module.weight.data, module.bias.data, module.running_mean):
                tensor[1::2] = 0
        elif isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.data
            if name != "head":
                weight[1::2] = 0
            if module.bias is not None and name != "head":
                module.bias.data[1::2] = 0
            if weight.shape[1] > 3 and name != "head":
                weight[:, 1::2] = 0
    net.head.weight.data.view(10, 48, 4)[:, 1::2] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_removed_is_what_counts_least(dtype: torch.dtype):
    """Of a network with dead channels, those are removed and the outputs stay; it is left as it was."""
    net = Mixed().to(dtype).eval()
    kill(net)
    net.stem.requires_grad_(False)
    before, x = copy.deepcopy(net.state_dict()), torch.randn(4, *SIZE, dtype=dtype)
    small = lr.prune(net, width=0.5, input_size=SIZE, multiple=1)
    assert (small.stem[0].out_channels, small.depthwise[0].groups, small.grouped[1][0].groups) == (16, 24, 4)
    torch.testing.assert_close(small(x), net(x))
    assert {name: p.requires_grad for name, p in small.named_parameters()} == {
        name: p.requires_grad for name, p in net.named_parameters()
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    ("make", "options"),
    [(Mixed, {"macs": 0.6}), (ConvNext, {"macs": 0.6}), (vgg, {"macs": 0.6}), (pytorchcv_resnet, {"width": 0.77})],
)
def test_a_share_of_the_macs_is_kept(make: Callable[[], nn.Module], options: dict):
    net = make().train()
    small = lr.prune(net, **options, input_size=SIZE, multiple=4)
    assert lr.count(small, SIZE).macs / lr.count(net, SIZE).macs == pytest.approx(0.6, abs=0.04)
    assert all(module.training for module in small.modules())
    assert small(torch.randn(2, *SIZE)).shape == (2, 10)


class Twice(Mixed):
    """A layer that the forward reads by a fixed width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.stem(x).view(-1, 32, 1024).mean()


class GroupsOfSeveral(nn.Module):
    """A grouped conv whose groups cut across the two layers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 32, 1), nn.Conv2d(3, 16, 1)
        self.grouped, self.head = nn.Conv2d(48, 48, 3, groups=4), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(torch.cat([self.left(x), self.right(x)], 1))
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """A shuffle of two channel groups, which the next layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = conv(3, 32), conv(32, 32, groups=32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.two(x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
        return self.head(x.mean((2, 3)))


def pytorchcv_shufflenet(name: str) -> nn.Module:
    net = pytest.importorskip("pytorchcv.model_provider").get_model(name)
    net.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1))
    net[2].weight = net[1].weight
    return net


def not_a_number() -> nn.Module:
    net = vgg()
    net[0][1].running_var[3] = torch.nan
    return net


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (vgg, {}, "prune takes either a width or a share"),
        (vgg, {"macs": 1.5}, "macs must be a number above 0 and at most 1"),
        (vgg, {"width": float("nan")}, "width must be a number above 0"),
        (vgg, {"width": 0.5, "layers": {"nose": 1.0}}, "no layer 'nose'"),
        (lambda: lr.convert(vgg(), "lr"), {"width": 0.5}, "prune takes dense networks, and 0.0 is low-rank"),
        (not_a_number, {"width": 0.5}, "cannot be pruned: it has weights that are not finite"),
        (tied, {"width": 0.5}, "cannot be pruned: 1 shares a parameter"),
        (GroupsOfSeveral, {"width": 0.5, "multiple": 4}, "groups of a conv that takes left would lose different"),
        (Shuffled, {"width": 0.5}, "with fewer channels it computes something else"),
        (
            lambda: pytorchcv_shufflenet("shufflenet_g2_w1"),
            {"width": 0.5, "multiple": 1},
            "lose different channel",
        ),
        (lambda: pytorchcv_shufflenet("shufflenetv2_wd2"), {"width": 0.5}, "cannot follow the channels"),
        (Twice, {"width": 0.5}, "cannot be made thinner"),
        (lambda: vgg().to("meta"), {"width": 0.5}, "on the meta device"),
    ],
)
def test_networks_and_shares_that_are_refused(make: Callable[[], nn.Module], options: dict, words: str):
    with pytest.raises(lr.LowRankError, match=words):
        lr.prune(make(), input_size=SIZE, **options)


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(lr.MissingExtra, match=r"prune needs torch_pruning: .*\.\[prune\]"):
        lr.prune(vgg(), width=0.5, input_size=SIZE)
