"""Whatever merge, plan, optimize and export give back computes what the original does, or they refuse.

Networks and their forwards are drawn at random: branches and sums, layers that are used again, hooks, views, calls
of functions, changes in place, forwards that look at sizes or values, and layers held where no tool looks. Some
take an optional input, which decides about steps, or bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.compare import difference
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.blocks import CANDIDATES
from lowrank_cnn.deploy.engines.request import named_tensors
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.schemes import build_conv

CHANNELS, SIZE = 4, 6
Step = Callable[["Drawn", list[Tensor]], Tensor]


class Drawn(nn.Module):
    """Layers by number, and steps that call them on the values so far; the last value is given back."""

    def __init__(self, layers: list[nn.Module], steps: list[Step], end: Step) -> None:
        super().__init__()
        self.layers, self.steps, self.end = nn.ModuleList(layers), steps, end
        self.held = list(layers)  # where no tool looks

    def forward(self, x: Tensor) -> Any:
        return self.run(x, [True] * len(self.steps))

    def run(self, x: Tensor, takes: list[bool]) -> Any:
        values = [x * 1]
        for step, taken in zip(self.steps, takes, strict=True):
            if taken:
                values.append(step(self, values))
        return self.end(self, values)


class DrawnWithOption(Drawn):
    """Takes bytes too, and an optional input: some steps run only with it, some only without it."""

    def __init__(self, *parts: Any, only: list[bool | None]) -> None:
        super().__init__(*parts)
        self.only = only

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        given = context is not None
        result = self.run(self.scaled(x), [only is None or only == given for only in self.only])
        return (result, context + 1) if context is not None else result

    def scaled(self, x: Tensor) -> Tensor:
        return x


class DrawnForBytes(DrawnWithOption):
    def scaled(self, x: Tensor) -> Tensor:
        return x.double() / 255 if x.dtype == torch.uint8 else x


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


def if_many(net: Drawn, values: list[Tensor]) -> Tensor:
    return 2 * values[-1] if len(values[-1]) > len(EXAMPLE) else values[-1]


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


def any_step(random: Random) -> Step:
    """Mostly calls of layers one after the other, sometimes anything else."""
    number = random.randrange(6)
    if random.random() < 0.6:
        return random.choice([partial(through, -1, number), partial(through_all, number), partial(through_all, 0)])
    return random.choice(
        [
            partial(through, number, number), partial(through_held, number), partial(times_a_weight, number),
            partial(added, number), partial(added, 0), partial(added_in_place, number), partial(added_in_place, 0),
            partial(activated, random.choice(["relu", "silu", "gelu", "leaky_relu", "hardswish"])),
            partial(rectified_in_place, number), viewed, viewed, if_large, if_many, if_positive,
        ]
    )  # fmt: skip


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


CONVS = ["dense", "lr", "lr-join", "separable", "pair"]
OTHERS = ["norm", "norm", "relu", "relu in place", "silu", "same"]


def network(seed: int) -> nn.Module:
    """Up to six layers and eight steps, in float64 and in evaluation; one in four has a hook."""
    random = Random(seed)
    torch.manual_seed(seed)
    layers = [layer(random.choice(kinds)) for _ in range(random.randint(1, 3)) for kinds in (CONVS, OTHERS)]
    steps = [any_step(random) for _ in range(random.randint(1, 8))]
    parts = (layers, steps, random.choice([last, flat, pooled, several]))
    only = [random.choice([None, None, True, False]) for _ in steps]
    with_option = random.choice([None, None, DrawnWithOption, DrawnForBytes])
    net = Drawn(*parts) if with_option is None else with_option(*parts, only=only)
    if random.random() < 0.25:
        random.choice(layers).register_forward_hook(doubled)
    for part in net.modules():
        if getattr(part, "bias", None) is not None:
            nn.init.normal_(part.bias)
    return net.double().eval()


def images(batch: int, seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, SIZE, SIZE, generator=numbers, dtype=torch.float64)


@torch.no_grad()
def assert_same_function(
    make: Callable[[nn.Module], nn.Module],
    net: nn.Module,
    *,
    read: Callable[[Any], Any] = lambda result: result,
    options: bool = True,
) -> None:
    """The result is the original for other inputs, other batches and other calls; the original is as it was."""
    kept = copy.deepcopy(net)
    try:
        made = make(net)
    except LowRankError:
        made = net
    for batch, seed in ((2, 5), (1, 6), (3, 7)):
        x = images(batch, seed)
        calls = [(x,)]
        calls += [(x, EXAMPLE), (x, None)] if isinstance(net, DrawnWithOption) and options else []
        calls += [(x.clamp(0, 1).mul(255).byte(),)] if isinstance(net, DrawnForBytes) and options else []
        for call in calls:
            assert difference(read(made(*call)), read(kept(*call))) < 1e-8
            assert difference(net(*call), kept(*call)) == 0


def example(net: nn.Module, told: bool) -> tuple[Tensor, ...]:
    """The inputs to rewrite a network for: with its optional input or without."""
    return (EXAMPLE, EXAMPLE + 1) if told and isinstance(net, DrawnWithOption) else (EXAMPLE,)


EXAMPLE = images(2, 1)
NETWORKS = st.integers(0, 2**31).map(network)
SLOWLY = [HealthCheck.too_slow]


@settings(max_examples=20, suppress_health_check=SLOWLY)
@given(NETWORKS, st.sampled_from([None, False, True]), st.sampled_from([None, True]))
def test_merge(net: nn.Module, told: bool | None, chains: bool | None):
    inputs = None if told is None else example(net, told)
    assert_same_function(lambda net: merge(net, chains=chains, example_input=inputs), net)


class ReadsANorm(nn.Module):
    """With a context, its result also depends on the weight of a norm that every call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.norm(self.conv(x))
        return y if context is None else y * next(self.norm.parameters(), torch.zeros(())).mean()


@pytest.mark.parametrize("told", [None, EXAMPLE])
def test_a_norm_whose_weight_other_calls_read_is_not_folded(told: Tensor | None):
    net = ReadsANorm().double().eval()
    merged = merge(net, example_input=told)
    assert difference(merged(EXAMPLE, EXAMPLE), net(EXAMPLE, EXAMPLE)) < 1e-8
    assert "reads weights that would be merged" in notes(merged).merging[0].reason


FIXTURE = HealthCheck.function_scoped_fixture  # which stays the same for all examples


@pytest.mark.parametrize("way", ["by group", "merged"])
@settings(max_examples=8, suppress_health_check=[*SLOWLY, FIXTURE])
@given(net=NETWORKS, told=st.booleans())
def test_plan(last_wins: None, way: str, net: nn.Module, told: bool):
    ways = {"as given": CANDIDATES["as given"], way: CANDIDATES[way]}
    assert_same_function(lambda net: plan(net, example(net, told), cache=False, candidates=ways), net)


@settings(max_examples=6, suppress_health_check=[*SLOWLY, FIXTURE])
@given(net=NETWORKS, told=st.booleans())
def test_optimize(last_wins: None, net: nn.Module, told: bool):
    assert_same_function(lambda net: optimize(net, example(net, told), compile=False, cache=False), net)


@settings(max_examples=3, suppress_health_check=SLOWLY)
@given(NETWORKS)
def test_export(net: nn.Module):
    def written(net: nn.Module) -> nn.Module:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "net.pt2"
            export(net, path, input_size=tuple(EXAMPLE.shape[1:]))
            return load(path, trusted=True)

    # A file has no containers within containers, and takes the inputs that it was written for.
    assert_same_function(written, net, read=named_tensors, options=False)


def test_the_networks_drawn_are_folded_planned_and_refused(last_wins: None):
    folded, used, refused = 0, 0, 0
    for seed in range(40):
        merged = merge(network(seed), chains=True, example_input=EXAMPLE)
        folded += any(row.error is not None for row in notes(merged).merging)
        planned = notes(plan(network(seed), EXAMPLE, cache=False)).plan
        used += planned.used and any(row.choice != "as given" for row in planned.decisions)
        refused += bool(planned.reason)
    assert min(folded, used, 3 * refused) >= 3, (folded, used, refused)


class Remembers(nn.Module):
    """Keeps what a call computed, for whoever wants to read it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.last = F.relu(self.norm(self.conv(x)))
        return self.last.mean((2, 3))


def test_a_network_that_keeps_a_tensor_still_does(last_wins: None):
    net = Remembers().double().eval()
    new = plan(net, EXAMPLE[:, :3], cache=False)
    new(EXAMPLE[:, :3])
    assert new.last.shape == (len(EXAMPLE), 8, SIZE - 2, SIZE - 2)
    assert not net.last.shape
