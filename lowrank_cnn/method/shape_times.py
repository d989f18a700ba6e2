"""What the shapes of filters cost in milliseconds, measured on the device.

On a GPU layers are timed inside CUDA graphs: there launches take no time, as when a network is deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.method.channel_order import free_routes
from lowrank_cnn.method.rewriting import copy_with, in_channels_last
from lowrank_cnn.method.settling import settle
from lowrank_cnn.method.shape_choice import ShapeChooser, ShapeCosts
from lowrank_cnn.method.shape_damage import shaped_convs
from lowrank_cnn.method.shape_network import layer_inputs
from lowrank_cnn.method.shaping import ShapedConv2d, conv_of_form, exact_scheme
from lowrank_cnn.method.spec import Pair
from lowrank_cnn.system.clock import Key, measure

Prepare = Callable[[nn.Module, torch.Tensor], Callable[[], object]]
"""Makes a network in evaluation ready to be timed on a batch."""
_ROUNDS = 2
"""Networks that are built and timed to correct the cost of several shapes in a layer."""
_MOST = 4.0
"""The most that one of them changes it by: times are noisy."""


def as_it_is(network: nn.Module, image: torch.Tensor) -> Callable[[], object]:
    """A network that is timed as torch runs it."""
    return lambda: network(image)


@torch.no_grad()
def time_costs(
    network: nn.Module, dense: nn.Module, input_size: Sequence[int], *, batch: int = 1, prepare: Prepare = as_it_is
) -> ShapeCosts:
    """Milliseconds, measured on the device of `dense`: each conv with filters of one shape, and with all shapes.

    Several shapes take longer than their shares of the time, because each is a conv of its own: the measured
    difference is divided among the shapes beyond the first. Between shares of shapes the time is interpolated, and
    so it is for fewer input channels. What lies between the layers is the time of the whole dense network less
    that of its layers.
    """
    like = next(dense.parameters())
    dtype = torch.bfloat16 if like.is_cuda else like.dtype
    twin = _placed(dense, like.device, dtype)
    image = torch.randn(batch, *input_size, device=like.device, dtype=dtype)
    seen = layer_inputs(twin, [n for n, m in network.named_modules() if isinstance(m, ShapedConv2d)], image)
    whole = _measured({"": prepare(twin, image)}, image)[""]
    filters, splits, spent = {}, {}, 0.0
    for name, x in seen.items():
        layer = network.get_submodule(name)
        assert isinstance(layer, ShapedConv2d)
        mixed = layer.shapes[: layer.out_channels]
        parts = {shape: len(range(place, layer.out_channels, len(mixed))) for place, shape in enumerate(mixed)}
        counts = {shape: {shape: layer.out_channels} for shape in (*layer.shapes, layer.form.kernel)}
        runs = {one: _timed(_of_shapes(layer, of).to(x), x) for one, of in {**counts, None: parts}.items()}
        times = _measured(runs, x, budget=1.0)
        filters[name] = tuple(times[shape] / layer.out_channels for shape in layer.shapes)
        shares = sum(times[shape] * count for shape, count in parts.items()) / layer.out_channels
        splits[name] = max(0.0, times[None] - shares) / max(1, len(parts) - 1)
        spent += times[layer.form.kernel]
    return ShapeCosts("latency", filters, {}, max(0.0, whole - spent), max(whole, spent), splits)


def corrected(
    costs: ShapeCosts,
    network: nn.Module,
    dense: nn.Module,
    input_size: Sequence[int],
    share: float,
    *,
    batch: int = 1,
    prepare: Prepare = as_it_is,
) -> ShapeCosts:
    """The costs with those of several shapes in a layer scaled, so that whole networks cost what they take.

    Groups of few filters take longer than their share of a large one. So a network within the budget is built, by
    the weights as they are, and timed as a whole.
    """
    routes = free_routes(network, input_size)
    for _ in range(_ROUNDS):
        trial = copy_with(network)
        expected = ShapeChooser(routes, costs).choose(trial, share)
        split = sum(
            costs.splits[name] * (len(layer.choice[layer.kept].unique()) - 1)
            for name, layer in shaped_convs(trial).items()
        )
        if split <= 0:
            break
        taken = time_share(settle(trial, input_size), dense, input_size, batch=batch, prepare=prepare)
        scale = min(_MOST, max(1 / _MOST, 1 + (taken - expected) * costs.dense / split))
        costs = replace(costs, splits={name: scale * cost for name, cost in costs.splits.items()})
    return costs


@torch.no_grad()
def time_share(
    network: nn.Module, dense: nn.Module, input_size: Sequence[int], *, batch: int = 1, prepare: Prepare = as_it_is
) -> float:
    """The time of a network as a share of the dense one's, measured in turns."""
    like = next(dense.parameters())
    dtype = torch.bfloat16 if like.is_cuda else like.dtype
    image = torch.randn(batch, *input_size, device=like.device, dtype=dtype)
    ours, theirs = (prepare(_placed(one, like.device, dtype), image) for one in (network, dense))
    times = _measured({"ours": ours, "theirs": theirs}, image)
    return times["ours"] / times["theirs"]


def _measured(
    runs: Mapping[Key, Callable[[], object]], x: torch.Tensor, *, budget: float = 2.0
) -> dict[Key, float]:
    """Milliseconds: on a CPU the least, because other processes interrupt networks more often than layers."""
    if x.is_cuda:
        times = measure(runs, repeats=15, budget=budget, cuda=True)
    else:
        times = measure(runs, repeats=31, budget=budget, of=min)
    return {name: one.ms for name, one in times.items()}


def _timed(conv: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return captured(lambda: conv(x)).replay if x.is_cuda else as_it_is(conv, x)


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return in_channels_last(copy_with(model).eval().to(device, dtype))


def _of_shapes(layer: ShapedConv2d, counts: Mapping[Pair, int]) -> nn.Module:
    conv = conv_of_form(layer.form, exact_scheme(list(counts.items())))
    return in_channels_last(conv.eval())
