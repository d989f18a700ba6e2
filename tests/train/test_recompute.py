"""Stages computed twice give the gradients, statistics and random draws of stages computed once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.kernels import device as mode
from lowrank_cnn.models import create_model
from lowrank_cnn.train.recompute import Recomputed, recomputed

NETWORKS = ["vgg11-gmp", "vgg11-gmp-lr-join-wfull", "googlenet-lr", "nin-c3-lr"]


def build(name: str, norm: str | None = None, **options) -> nn.Module:
    torch.manual_seed(0)
    return create_model(name, num_classes=5, width=0.0625, norm=norm, **options).train()


def backward(network: nn.Module, forward: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a loss over all outputs, after seeding what dropout draws."""
    torch.manual_seed(1)
    outputs = forward(images)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    network.zero_grad()
    sum(output.square().sum() for output in outputs).backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("norm", [None, "batch"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_statistics_are_equal(name: str, norm: str | None):
    plain = build(name, norm)
    twin = copy.deepcopy(plain)
    images = torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(2))
    right = backward(plain, plain, images)
    ours = backward(twin, recomputed(twin).train(), images)
    for parameter in right:
        assert torch.equal(right[parameter], ours[parameter]), parameter
    for (place, one), (_, other) in zip(plain.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(one, other), place


def test_the_kernels_are_run_twice_too():
    pytest.importorskip("triton")
    steps = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(8, 4, 1), nn.ReLU()]
    network = nn.Sequential(*steps)
    twin, images = copy.deepcopy(network), torch.randn(2, 3, 9, 8)
    right = backward(network, network, images)
    with mode.forced("on"):
        ours = backward(twin, recomputed(twin, within=fuse).train(), images)
    for parameter in right:
        torch.testing.assert_close(ours[parameter], right[parameter], rtol=1e-3, atol=1e-3)
    assert twin[1].num_batches_tracked == 1
    torch.testing.assert_close(twin[1].running_var, network[1].running_var)


@pytest.mark.parametrize(
    ("name", "stages"), [("vgg11-gmp", 5), ("googlenet", 11), ("nin", 3), ("vgg11-gmp-lr-join", 5)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_network_is_cut_behind_its_pools_and_around_its_branches(name: str, stages: int, fused: bool):
    network = build(name)
    twin = recomputed(network, within=fuse) if fused else recomputed(network)
    assert sum(isinstance(module, Recomputed) for module in twin.modules()) == stages
    heads = [module for module in twin.modules() if isinstance(module, Recomputed)]
    assert not any(isinstance(inner, nn.Linear) for head in heads for inner in head.modules())


def test_the_network_itself_is_not_touched():
    network = build("vgg11-gmp")
    names = [name for name, _ in network.named_modules()]
    twin = recomputed(network)
    assert [name for name, _ in network.named_modules()] == names
    shared = {parameter.data_ptr() for parameter in network.parameters()}
    assert {parameter.data_ptr() for parameter in twin.parameters()} == shared


@pytest.mark.parametrize("name", ["vgg11-gmp", "googlenet"])
def test_less_is_kept_for_the_backward_pass(name: str):
    network = build(name)
    images = torch.randn(2, 3, 64, 64)
    assert kept(recomputed(network).train(), images) < 0.4 * kept(network, images)


class Branches(nn.Module):
    """One module under two names, a name for none, and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))
        self.register_module("third", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.third is None else x


def test_every_name_is_kept_and_a_step_that_comes_twice_runs_twice():
    network, x = Branches(), torch.randn(2, 3, 4, 4)
    assert torch.equal(recomputed(network)(x), network(x))
    relu = nn.ReLU()
    network, x = nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 5, 3), relu), torch.randn(2, 3, 8, 8)
    assert torch.equal(recomputed(network)(x), network(x))
    with torch.no_grad():
        assert torch.equal(recomputed(network)(x), network(x))


def kept(network: nn.Module, images: torch.Tensor) -> int:
    """Bytes of distinct tensors that a forward pass keeps, parameters apart."""
    own = {parameter.data_ptr() for parameter in network.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(images)
    assert output is not None
    return sum(found.values())
