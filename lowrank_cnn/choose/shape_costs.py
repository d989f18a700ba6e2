"""What each shape of a filter costs in a network, counted or measured; the budget of a run that learns shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.choose.shape_choice import ShapeChooser, ShapeCosts
from lowrank_cnn.core.clock import Key, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import UnreadableError, read_json, write_json
from lowrank_cnn.core.modules import first_input
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.method.channels import Route, free_routes
from lowrank_cnn.method.count import count
from lowrank_cnn.method.finalize_shapes import settle
from lowrank_cnn.method.geometry import form_of
from lowrank_cnn.method.rewrite import copy_with, frozen_like, in_channels_last, rewrite
from lowrank_cnn.method.schemes import NONE, Scheme
from lowrank_cnn.method.select import Where, select
from lowrank_cnn.method.shaped_layers import (
    GatedLinear,
    ShapedConv2d,
    exact_scheme,
    may_remove,
    shaped_convs,
    shaped_layer,
)
from lowrank_cnn.method.spec import Pair
from lowrank_cnn.train.distributed import generator_states, made_by_first, resolve_device, restore_generators
from lowrank_cnn.train.recipe import in_words
from lowrank_cnn.train.run_folder import RunDirectory


def shape_network(
    model: nn.Module, scheme: Scheme, input_size: Sequence[int], *, where: Where = None
) -> nn.Module:
    """A copy of a dense network, computing the same, whose spatial convs can learn the shapes of their filters.

    If the scheme may remove filters, convs of 1x1 take part too, and so do linear layers that read channels.
    Frozen convs keep their filters, and so do those that run in training alone: they cost nothing later.
    """
    convs, kept = select(model, scheme, where, trained_on=True)
    running = _running(model, list(convs), input_size)
    schemes = {name: scheme for name, conv in convs.items() if conv.groups == 1 and name in running}
    if not schemes:
        raise LowRankError("shapes are learned by convolutions without channel groups, and this network has none.")
    if may_remove(scheme):
        schemes |= _narrowed(model, schemes, scheme, free_routes(model, input_size), widen=where is None)

    def fill(_: str, layer: nn.Module, new: nn.Module) -> None:
        new.copy_dense(layer.weight, layer.bias)  # type: ignore[operator]
        frozen_like(layer, new)

    new = rewrite(model, schemes, build=shaped_layer, fill=fill, kept=kept)
    note(new, input_size=tuple(input_size))
    return new


@torch.no_grad()
def _running(model: nn.Module, names: Sequence[str], input_size: Sequence[int]) -> set[str]:
    """The layers that run in evaluation; an auxiliary head does not."""
    like = next(model.parameters())
    image = torch.zeros(1, *input_size, device=like.device, dtype=like.dtype)
    return {*layer_inputs(copy_with(model).eval(), names, image)}


def _narrowed(
    model: nn.Module, chosen: Mapping[str, Scheme], scheme: Scheme, routes: Mapping[str, Route], *, widen: bool
) -> dict[str, Scheme]:
    """More layers that ignore or lose channels: readers of chosen ones, and 1x1 convs whose channels are free."""
    one = (("1x1", Fraction(1)),)
    own = replace(scheme, shapes=(*one, (NONE, Fraction(1))))
    more = {name: own for name in routes if widen and name not in chosen and _is_pointwise(model, name)}
    sources = {*chosen, *more}
    readers = [reader.name for name, route in routes.items() if name in sources for reader in route.readers]
    gates = [name for name in readers if name not in sources]
    return more | {name: replace(scheme, shapes=_kernel_of(model, name)) for name in gates}


def _is_pointwise(model: nn.Module, name: str) -> bool:
    conv = model.get_submodule(name)
    if not isinstance(conv, nn.Conv2d) or not conv.weight.requires_grad:
        return False
    form = form_of(conv)
    return form is not None and form.kernel == (1, 1) and form.groups == 1


def _kernel_of(model: nn.Module, name: str) -> tuple[tuple[str, Fraction], ...]:
    """A reader that learns no shapes keeps its kernel."""
    height, width = getattr(model.get_submodule(name), "kernel_size", (1, 1))
    return ((f"{height}x{width}", Fraction(1)),)


def mac_costs(network: nn.Module, dense: nn.Module, input_size: Sequence[int]) -> ShapeCosts:
    """Multiply-accumulates of one image."""
    found = count(dense, input_size)
    macs = {row.name: row.macs for row in found.layers}
    filters, linear = {}, {}
    for name, layer in network.named_modules():
        if isinstance(layer, ShapedConv2d):
            taps = layer.form.kernel[0] * layer.form.kernel[1]
            tap = macs.get(name, 0) / taps / layer.out_channels
            filters[name] = tuple(tap * height * width for height, width in layer.shapes)
        elif isinstance(layer, GatedLinear):
            linear[name] = float(macs.get(name, 0))
    rest = found.macs - sum(macs.get(name, 0) for name in (*filters, *linear))
    return ShapeCosts("macs", filters, linear, float(rest), float(found.macs))


def layer_inputs(network: nn.Module, names: Sequence[str], image: Tensor) -> dict[str, Tensor]:
    """The input of each layer when the network runs on an image; layers that do not run are left out."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, args, kwargs: seen.update({name: first_input(args, kwargs)})

    layers = {name: network.get_submodule(name) for name in names}
    hooks = [layer.register_forward_pre_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with unchanged(network):
            network(*copied(image))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


Prepare = Callable[[nn.Module, Tensor], Callable[[], object]]
"""Makes a network in evaluation ready to be timed on a batch."""
_ROUNDS = 2
"""Networks that are built and timed to correct the cost of several shapes in a layer."""
_MOST = 4.0
"""The most that one of them changes it by: times are noisy."""


def as_it_is(network: nn.Module, image: Tensor) -> Callable[[], object]:
    """A network that is timed as torch runs it."""
    return lambda: network(image)


@torch.no_grad()
def time_costs(
    network: nn.Module, dense: nn.Module, input_size: Sequence[int], *, batch: int = 1, prepare: Prepare = as_it_is
) -> ShapeCosts:
    """Milliseconds, measured on the device of `dense`: each conv with filters of one shape, and with all shapes.

    Several shapes take longer than their shares of the time, because each is a conv of its own: the measured
    difference is divided among the shapes beyond the first. The time is linear in the number of filters and of
    input channels. The rest is the time of the whole dense network less that of its layers.
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

    Groups of few filters take longer than their share of a large one. So we choose shapes within the budget by the
    present weights, build that network and time it as a whole.
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


def _measured(runs: Mapping[Key, Callable[[], object]], x: Tensor, *, budget: float = 2.0) -> dict[Key, float]:
    """Milliseconds: on a CPU the least, because other processes interrupt networks more often than layers."""
    if x.is_cuda:
        times = measure(runs, repeats=15, budget=budget, cuda=True)
    else:
        times = measure(runs, repeats=31, budget=budget, of=min)
    return {name: one.ms for name, one in times.items()}


def _timed(conv: nn.Module, x: Tensor) -> Callable[[], object]:
    """A layer to be timed: on a GPU inside a CUDA graph, where launches take no time, as in deployment."""
    return captured(lambda: conv(x)).replay if x.is_cuda else as_it_is(conv, x)


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return in_channels_last(copy_with(model).eval().to(device, dtype))


def _of_shapes(layer: ShapedConv2d, counts: Mapping[Pair, int]) -> nn.Module:
    conv = exact_scheme(list(counts.items())).build_form(layer.form)
    return in_channels_last(conv.eval())


BATCH = 64
"""Images at a time that a GPU is timed with, unless the user says how many."""
COSTS, _LAST = "shape_costs.json", "last_share"
"""The file in the directory of a run, and in it the share that the last choice was made for."""
_TRIES, _CLOSE, _FURTHEST = 4, 0.02, 0.8
"""Tries of the last choice, the excess that is no reason for another, and the least factor of one."""


def as_optimized(network: nn.Module, image: Tensor) -> Callable[[], object]:
    """A network that is timed as it is deployed on a GPU: norms folded, kernels chosen, one CUDA graph."""
    fast = optimize(network, image, compile=False)
    return lambda: fast(image)


@dataclass(frozen=True)
class ShapeBudget:
    """What a run was asked for, such as `{"macs": 0.4, "by": "proximal"}`, and its directory, if it has one.

    Times are measured on `device`, with `batch` images at a time. A resumed run reads the costs that the run found
    when it began, because times measured twice differ; it must ask for the same.
    """

    asked: Mapping[str, Any]
    directory: RunDirectory | None
    device: str = "auto"
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and (not isinstance(self.batch, int) or self.batch < 1):
            raise LowRankError(f"batch is the number of images at a time, one or more, not {self.batch!r}.")

    def costs(self, shaped: nn.Module, model: nn.Module, size: tuple[int, ...], *, resume: bool) -> ShapeCosts:
        """The cost of each shape in every layer. The first process finds it for all, and keeps it by `keep`."""

        def find() -> ShapeCosts:
            if self.directory and not resume:
                self.directory.check_free()
            known = self._kept(shaped) if resume else None
            if known is not None:
                return known
            if "macs" in self.asked:
                return mac_costs(shaped, model, size)
            dense = self._placed(model)
            costs = time_costs(shaped, dense, size, **self._how)
            return corrected(costs, shaped, dense, size, self.asked["latency"], **self._how)

        return made_by_first(find, self.device)

    def time_of(self, network: nn.Module, model: nn.Module, size: tuple[int, ...]) -> float | None:
        """The measured time of the result as a share of the dense network's; None for a budget of MACs."""
        if "latency" not in self.asked:
            return None
        device = torch.device(resolve_device(self.device))
        before = generator_states(device)
        try:
            return made_by_first(lambda: self._time_share(settle(network, size), model, size), self.device)
        finally:
            restore_generators(before, device)  # a run draws the same numbers whether it is timed or not

    def choose_last(
        self,
        choose: Callable[[float], Any],
        network: nn.Module,
        *,
        blank: nn.Module,
        model: nn.Module,
        size: tuple[int, ...],
    ) -> None:
        """Choose for the last time, within less than the budget if the network is measured to take longer.

        If no try is within the budget, the fastest is taken. `blank` is a copy of the network from before
        training: layers that train have hooks, which take time. The share is written down, so that a run that is
        killed before its next checkpoint chooses the same again.
        """
        share = made_by_first(self._last_share, self.device)
        if share is not None:
            choose(share)
            return
        share, tried = self.asked["latency"], {}
        for _ in range(_TRIES):
            choose(share)
            blank.load_state_dict(network.state_dict())
            tried[share] = taken = self.time_of(blank, model, size) or 0.0
            if not self.exceeded_by(taken):
                break
            share *= max(_FURTHEST, self.asked["latency"] / taken)
        best = min(tried, key=lambda share: tried[share])
        if best != share:
            choose(best)
        if self.directory and first_process():
            path = self.directory.path / COSTS
            write_json(path, {**read_json(path), _LAST: best})

    def exceeded_by(self, time: float) -> bool:
        """Whether a measured share of the time is above the budget, by more than times differ."""
        return time > (1 + _CLOSE) * self.asked["latency"]

    def _last_share(self) -> float | None:
        path = self.directory.path / COSTS if self.directory else None
        return read_json(path).get(_LAST) if path and path.is_file() else None

    def _time_share(self, network: nn.Module, model: nn.Module, size: tuple[int, ...]) -> float:
        return time_share(network, self._placed(model), size, **self._how)

    def _placed(self, model: nn.Module) -> nn.Module:
        return copy_with(model).to(resolve_device(self.device))

    @property
    def _how(self) -> dict[str, Any]:
        """How networks are timed: on a GPU through `optimize`, many images at a time."""
        device = resolve_device(self.device)
        prepare: Prepare = as_optimized if device.startswith("cuda") else as_it_is
        return {"batch": self.batch or (1 if device == "cpu" else BATCH), "prepare": prepare}

    def keep(self, costs: ShapeCosts) -> None:
        """Write the costs of a run that begins, to be read when it is resumed."""
        if self.directory is None:
            return
        path = self.directory.path / COSTS
        if not (self.directory.holds_run() and path.is_file()):
            write_json(path, {"asked": dict(self.asked), "costs": costs.to_dict()})

    def _kept(self, shaped: nn.Module) -> ShapeCosts | None:
        """The costs of the run that is resumed, which must ask for the same; None if it has not begun."""
        if self.directory is None or not self.directory.holds_run():
            return None
        path = self.directory.path / COSTS
        if not path.is_file():
            return None
        try:
            found = read_json(path)
            asked, costs = dict(found["asked"]), ShapeCosts(**found["costs"])
            known = {name: len(prices) for name, prices in costs.filters.items()}
        except (UnreadableError, ValueError, TypeError, KeyError, AttributeError) as error:
            told = f"{path} holds no costs of shapes: remove it, and they are found anew."
            raise LowRankError(told) from error
        names = {*asked, *self.asked}
        differ = {n: (asked.get(n), self.asked.get(n)) for n in names if asked.get(n) != self.asked.get(n)}
        if differ:
            raise LowRankError(f"the run in {self.directory.path} learns shapes with {in_words(differ)}.")
        if known != {name: len(layer.shapes) for name, layer in shaped_convs(shaped).items()}:
            raise LowRankError(f"{path} holds the costs of another network: choose another --out.")
        return costs
