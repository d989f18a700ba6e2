"""Whatever merge, plan, optimize and export give back computes what the original does, or they refuse in a sentence.

Networks and their forwards are drawn at random: branches and sums, layers that are used again, hooks, views, calls
of functions, changes in place, forwards that look at sizes or values, and layers held where no tool looks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.deploy import export, load, merge, optimize, plan
from lowrank_cnn.deploy.blocks import Block, BlockAsGiven
from lowrank_cnn.deploy.candidates import CANDIDATES
from lowrank_cnn.method.layers import build_conv
from lowrank_cnn.system.compare import difference
from lowrank_cnn.system.errors import LowRankError

CHANNELS, SIZE = 4, 6
Step = Callable[["Drawn", list[Tensor]], Tensor]


class Drawn(nn.Module):
    """Layers by number, and steps that call them on the values so far; the last value is given back."""

    def __init__(self, layers: list[nn.Module], steps: list[Step], end: Step) -> None:
        super().__init__()
        self.layers, self.steps, self.end = nn.ModuleList(layers), steps, end
        self.held = list(layers)  # where no tool looks

    def forward(self, x: Tensor) -> Any:
        values = [x * 1]
        for step in self.steps:
            values.append(step(self, values))
        return self.end(self, values)


def through(place: int, at: int, net: Drawn, values: list[Tensor]) -> Tensor:
    return net.layers[at % len(net.layers)](values[place % len(values)])


def through_all(place: int, net: Drawn, values: list[Tensor]) -> Tensor:
    """Walk neighbouring layers one by one, as a Sequential would."""
    value = values[-1]
    for layer in net.layers[place % len(net.layers) :][:3]:
        value = layer(value)
    return value


def through_held(at: int, net: Drawn, values: list[Tensor]) -> Tensor:
    return net.held[at % len(net.held)](values[-1])


def added(place: int, net: Drawn, values: list[Tensor]) -> Tensor:
    return values[-1] + values[place % len(values)]


def added_in_place(place: int, net: Drawn, values: list[Tensor]) -> Tensor:
    value = values[-1]
    value += values[place % len(values)]
    return value


def activated(name: str, net: Drawn, values: list[Tensor]) -> Tensor:
    return getattr(F, name)(values[-1])


def rectified_in_place(place: int, net: Drawn, values: list[Tensor]) -> Tensor:
    return F.relu(values[place % len(values)], inplace=True)


def viewed(net: Drawn, values: list[Tensor]) -> Tensor:
    value = values[-1]
    return value.view(value.size(0), -1).view(value.shape)


def if_large(net: Drawn, values: list[Tensor]) -> Tensor:
    return 2 * values[-1] if values[-1].shape[2] > SIZE - 1 else values[-1]


def if_positive(net: Drawn, values: list[Tensor]) -> Tensor:
    return values[-1] if values[-1].mean() > 0 else 3 * values[-1]


def times_a_weight(at: int, net: Drawn, values: list[Tensor]) -> Tensor:
    weight = next(net.layers[at % len(net.layers)].parameters(), None)
    return values[-1] if weight is None else values[-1] * weight.mean()


def last(net: Drawn, values: list[Tensor]) -> Tensor:
    return values[-1]


def flat(net: Drawn, values: list[Tensor]) -> Tensor:
    return values[-1].reshape(values[-1].size(0), -1)


def pooled(net: Drawn, values: list[Tensor]) -> Tensor:
    return F.max_pool2d(values[-1], 2).flatten(1)


def several(net: Drawn, values: list[Tensor]) -> dict[str, Any]:
    return {"last": values[-1], "all": [value.mean((2, 3)) for value in values]}


NUMBERS = st.integers(0, 5)
STEPS = st.one_of(
    st.builds(partial, st.just(through), st.integers(-1, 1), NUMBERS),
    st.builds(partial, st.just(through), st.just(-1), NUMBERS),
    st.builds(partial, st.just(through), st.just(-1), NUMBERS),
    st.builds(partial, st.just(through_all), NUMBERS),
    st.builds(partial, st.just(through_all), NUMBERS),
    st.builds(partial, st.just(through_held), NUMBERS),
    st.builds(partial, st.just(added), NUMBERS),
    st.builds(partial, st.just(added_in_place), NUMBERS),
    st.builds(partial, st.just(activated), st.sampled_from(["relu", "silu", "gelu", "leaky_relu", "hardswish"])),
    st.builds(partial, st.just(rectified_in_place), NUMBERS),
    st.builds(partial, st.just(times_a_weight), NUMBERS),
    st.sampled_from([viewed, viewed, if_large, if_positive]),
)


def layer(kind: str) -> nn.Module:
    if kind == "norm":
        norm = nn.BatchNorm2d(CHANNELS)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.weight)
        return norm
    plain = {"relu": nn.ReLU, "relu in place": lambda: nn.ReLU(inplace=True), "silu": nn.SiLU, "same": nn.Identity}
    if kind in plain:
        return plain[kind]()
    if kind == "pair":
        return nn.Sequential(layer("dense"), layer("norm"))
    return build_conv(CHANNELS, CHANNELS, 3, kind)


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


KINDS = ["dense", "lr", "lr-join", "separable", "norm", "norm", "relu", "relu in place", "silu", "same", "pair"]


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """Up to six layers and eight steps, in float64 and in evaluation, some layers with hooks."""
    torch.manual_seed(draw(st.integers(0, 100)))
    layers = [layer(kind) for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))]
    steps = draw(st.lists(STEPS, min_size=1, max_size=8))
    net = Drawn(layers, steps, draw(st.sampled_from([last, flat, pooled, several])))
    if draw(st.integers(0, 3)) == 0:
        layers[draw(NUMBERS) % len(layers)].register_forward_hook(doubled)
    for part in net.modules():
        if getattr(part, "bias", None) is not None:
            nn.init.normal_(part.bias)
    return net.double().eval()


def images(batch: int, seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, SIZE, SIZE, generator=numbers, dtype=torch.float64)


@torch.no_grad()
def check(make: Callable[[nn.Module], nn.Module], net: nn.Module) -> None:
    """The result is the original for other inputs and other batches, and the original is as it was."""
    kept = copy.deepcopy(net)
    try:
        made = make(net)
    except LowRankError:
        made = net
    for batch, seed in ((2, 5), (1, 6), (3, 7)):
        x = images(batch, seed)
        assert difference(made(x), kept(x)) < 1e-8
        assert difference(net(x), kept(x)) == 0


EXAMPLE = images(2, 1)
TOO_LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, suppress_health_check=TOO_LARGE)
@given(networks(), st.booleans(), st.sampled_from([None, True]))
def test_merge(net: nn.Module, told: bool, chains: bool | None):
    check(lambda net: merge(net, chains=chains, example_input=EXAMPLE if told else None), net)


class Slow(BlockAsGiven):
    """Loses against every other way, so that these are chosen."""

    def __init__(self, block: Block) -> None:
        super().__init__(block.layer, block.epilogue)

    def forward(self, *inputs: Tensor) -> Tensor:
        for _ in range(20):
            y = super().forward(*inputs)
        return y


@pytest.mark.parametrize("way", ["by group", "merged", "matrix products"])
@settings(max_examples=25, suppress_health_check=TOO_LARGE)
@given(networks())
def test_plan(way: str, net: nn.Module):
    ways = {"as given": Slow, way: CANDIDATES[way]}
    check(lambda net: plan(net, EXAMPLE, cache=False, repeats=3, candidates=ways), net)


@settings(max_examples=20, suppress_health_check=TOO_LARGE)
@given(networks())
def test_optimize(net: nn.Module):
    check(lambda net: optimize(net, EXAMPLE, compile=False, cache=False, repeats=3), net)


@settings(max_examples=12, suppress_health_check=TOO_LARGE)
@given(networks())
def test_export(net: nn.Module):
    def written(net: nn.Module) -> nn.Module:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "net.pt2"
            export(net, path, input_size=tuple(EXAMPLE.shape[1:]))
            return load(path, trusted=True)

    check(written, net)
