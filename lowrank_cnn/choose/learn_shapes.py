"""`learn_shapes`: train a network whose filters choose their own shapes, within a budget of MACs or time.

The network starts dense. After each epoch of the first part of training, every filter chooses its best shape anew,
and the taps outside it shrink, more after every epoch. The last choice drops them. The rest of the run trains the
filters with their final shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.choose.shape_choice import ShapeChooser, ShapeCosts, measure_damage
from lowrank_cnn.core.clock import Key, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, check_number, option
from lowrank_cnn.core.files import UnreadableError, read_json, write_json
from lowrank_cnn.core.modules import watched
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.data import Data, make_loader
from lowrank_cnn.data.own import for_classes
from lowrank_cnn.data.types import generator
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.graph.channels import free_routes, why_fixed
from lowrank_cnn.graph.finalize_shapes import LearnedShapes, finalize_shapes
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.count import count
from lowrank_cnn.method.geometry import form_of
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.rewrite import copy_with, frozen_like, in_channels_last, rewrite
from lowrank_cnn.method.schemes import NONE, Scheme, parse_scheme
from lowrank_cnn.method.schemes import Learned as LearnedScheme
from lowrank_cnn.method.select import Where, check_rewritable, select
from lowrank_cnn.method.shaped_layers import (
    GatedLinear,
    ShapedConv2d,
    exact_scheme,
    may_remove,
    shaped_convs,
    shaped_layer,
)
from lowrank_cnn.method.spec import Kernel
from lowrank_cnn.train.distributed import generator_states, made_by_first, resolve_device, restore_generators
from lowrank_cnn.train.fit import fit, recipe_for
from lowrank_cnn.train.inputs import augmentation, image_size, open_for
from lowrank_cnn.train.objective import Loss, class_scores
from lowrank_cnn.train.optimizers import flags_restored, freeze_parameters
from lowrank_cnn.train.progress import Lines, Progress
from lowrank_cnn.train.recipe import Recipe, in_words
from lowrank_cnn.train.run_folder import Epoch, Record, RunDirectory
from lowrank_cnn.train.trained import carried_by, load_checkpoint

SHAPES = ("kx1", "1xk", "1x1", "kxk")
CHOOSING = 0.6
"""The share of the epochs after which shapes are final."""
SAMPLED, IMAGES, _SEED = 8, 128, 24
"""Batches that the damage of shapes is measured on, the most images in each, and the seed of their order."""
BATCH = 64
"""Images at a time that a GPU is timed with, unless the user says how many."""
FOUND, COSTS, _LAST = "shapes.json", "shape_costs.json", "last_share"
"""Files in the directory of a run: the result; the costs, with the share that the last choice was made for."""
_TRIES, _CLOSE, _FURTHEST = 4, 0.02, 0.8
"""Tries of the last choice, the excess that is no reason for another, and the least factor of one."""


@dataclass(frozen=True)
class Learned:
    """The result of learning shapes.

    - `network`: the trained network, of plain convs and composites.
    - `shapes`: the filters of each layer; `shapes.apply(dense)` gives a fresh network to train from scratch.
    - `macs`: the share of the dense network's MACs that is left; None if they cannot be counted.
    - `record`: the record of the run.
    - `time`: for a budget of time, the measured share of the dense network's time.
    """

    network: nn.Module = field(repr=False)
    shapes: LearnedShapes
    macs: float | None
    record: Record
    time: float | None = None


def learn_shapes(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str = "modern",
    *,
    macs: float | None = None,
    latency: float | None = None,
    shapes: Sequence[str] | Scheme = SHAPES,
    multiple: int = 8,
    where: Where = None,
    batch: int | None = None,
    epochs: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    callbacks: Sequence[Any] = (),
    by: Literal["proximal"] = "proximal",
    **options: Any,
) -> Learned:
    """Train a copy of a dense network whose filters learn their shapes, within a share of its MACs or time.

    >>> learned = learn_shapes(net, "photos", macs=0.4, out="runs/photos")  # doctest: +SKIP
    >>> print(learned.shapes)  # doctest: +SKIP

    - `macs` or `latency`: the share that is left at the end. `latency` takes milliseconds of each layer and shape
      from a table that is measured on the device first, with `batch` images at a time: by default one on a CPU,
      and 64 on a GPU, where the time of one image hardly depends on shapes. A GPU runs the network through
      `optimize`.
    - `shapes`: a filter may take these, in terms of the layer's k x k: "kx1", "1xk", "1x1", "kxk", "5x1"...;
      with "none" among them, filters may be removed as well, so that the width is learned too.
    - `multiple`: filters of one shape come in multiples of this.
    - `where`: the convs that learn, as for `convert`.
    - `by`: "proximal" is the one mechanism. It shrinks the taps outside each filter's best shape, more after every
      epoch, and drops them at the last choice. The loss on a few batches says which shape is best.

    All else goes to `fit`: `out` and `resume` for a run that survives interruptions, `callbacks`, `seed`.
    Layers whose channels are added to others keep the order of their filters: a shape there has one run of them.
    The network returned has no masks; it was compared with the one that was trained, in float64.
    """
    budget = Budget.of(macs=macs, latency=latency)
    if budget is None or budget.share == 1:
        raise LowRankError(
            f"learn_shapes needs a budget below 1: {option('macs', 0.4)} or {option('latency', 0.5)}."
        )
    fields = {name: options.pop(name, None) for name in ("batch_size", "lr", "quantize")}
    recipe = recipe_for(data, recipe, {**fields, "epochs": epochs})
    scheme = learned_scheme(shapes, multiple)
    _check_asked(model, recipe, by)
    directory = RunDirectory.open(out, data, resume=resume)
    data = open_for(model, data, recipe)
    if options.get("loss") is None:
        data = for_classes(data)
    size = image_size(data.test, augmentation(recipe))
    shaped = _shaped(model, scheme, size, where, recipe)
    say = (Lines() if options.get("progress", True) and first_process() else Progress()).say
    if budget.kind == "latency":
        say("Every shape in every layer is timed first.")
    asked = {budget.kind: budget.share, "by": by, "shapes": str(scheme)}
    loss = options.get("loss") or partial(cross_entropy, output=recipe.output)
    run = ShapeRun(model, size, budget, asked, recipe, data, loss, directory, device, batch)
    run.begin(shaped, resume=resume)
    how = {**options, "out": out, "resume": resume, "device": device}
    record = fit(shaped, data, recipe, callbacks=(run, *callbacks), **how)
    if len(record.history) < run.changes_until:  # a callback or `early_stop` ended it
        raise LowRankError(
            f"the run was ended after epoch {len(record.history)}, and shapes are final after epoch "
            f"{run.changes_until}: let it go on."
        )
    if not run.epochs and out is not None:  # the run was finished before
        shaped = load_checkpoint(out, network=shaped).network
    network = finalize_shapes(shaped, size)
    found = LearnedShapes.of(network)
    if directory and first_process():
        found.save(directory.path / FOUND)
    left = None
    with contextlib.suppress(LowRankError):  # a forward that reads values cannot be counted
        left = count(network, size).macs / count(model, size).macs
    time = run.time_of(network)
    if time is not None and run.exceeded_by(time):
        say(f"The network takes {time:.2f} of the dense network's time; the budget is {budget.share:g}.")
    return Learned(network, found, left, record, time)


def _check_asked(model: nn.Module, recipe: Recipe, by: str) -> None:
    """Refuse impossible requests before images are read."""
    if recipe.epochs < 2:
        raise LowRankError("learning shapes takes two epochs at least: one to choose them, one to train them.")
    if by != "proximal":
        raise LowRankError(f"by={by!r} is not available: shapes are learned by 'proximal' alone.")
    check_rewritable(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("there are no weights to train: the network is on the meta device.")


def learned_scheme(shapes: Sequence[str] | Scheme, multiple: int = 8) -> Scheme:
    """The scheme of these shapes; a scheme is returned as it is."""
    if isinstance(shapes, LearnedScheme):
        return shapes
    if isinstance(shapes, str | Scheme) or not all(isinstance(shape, str) for shape in shapes):
        raise LowRankError(f'shapes must be a list such as ("kx1", "1xk", "kxk", "none"), not {shapes!r}.')
    found = Scheme("learned", tuple((shape, Fraction(1)) for shape in dict.fromkeys(shapes)), multiple=multiple)
    return parse_scheme(str(found))


def cross_entropy(outputs: Any, targets: Tensor, *, output: str | None = None) -> Tensor:
    """The loss of class scores; `output` names them if the network has several outputs."""
    return functional.cross_entropy(class_scores(outputs, output).float(), targets)


# The network that learns.


def _shaped(model: nn.Module, scheme: Scheme, size: tuple[int, ...], where: Where, recipe: Recipe) -> nn.Module:
    """The network that learns. Layers that the recipe freezes keep their filters."""
    with flags_restored(model):
        freeze_parameters(model, recipe.freeze)
        for _, first in list(weight_layers(model))[: int(recipe.whiten_first)]:
            first.requires_grad_(False)  # the filters that whiten are not trained
        shaped = shape_network(model, scheme, size, where=where)
    for name, parameter in model.named_parameters():
        shaped.get_parameter(name).requires_grad_(parameter.requires_grad)
    return shaped


def shape_network(
    model: nn.Module, scheme: Scheme, input_size: Sequence[int], *, where: Where = None
) -> nn.Module:
    """A copy of a dense network, computing the same, whose spatial convs can learn the shapes of their filters.

    If the scheme may remove filters, convs of 1x1 take part too, and so do linear layers that read channels.
    Frozen convs keep their filters, and so do those that run in training alone (an auxiliary head): they cost
    nothing later.
    """
    convs, kept = select(model, scheme, where, trained_on=True)
    like = next(model.parameters())
    image = torch.zeros(1, *input_size, device=like.device, dtype=like.dtype)
    running = layer_inputs(copy_with(model).eval(), [*convs], image)
    schemes = {name: scheme for name, conv in convs.items() if conv.groups == 1 and name in running}
    if not schemes:
        raise LowRankError("shapes are learned by convolutions without channel groups, and this network has none.")
    if may_remove(scheme):
        schemes |= _narrowed(model, schemes, scheme, input_size, widen=where is None)

    def fill(_: str, layer: nn.Module, new: nn.Module) -> None:
        new.copy_dense(layer.weight, layer.bias)  # type: ignore[operator]
        frozen_like(layer, new)

    new = rewrite(model, schemes, build=shaped_layer, fill=fill, kept=kept)
    note(new, input_size=tuple(input_size))
    return new


def _narrowed(
    model: nn.Module, chosen: Mapping[str, Scheme], scheme: Scheme, input_size: Sequence[int], *, widen: bool
) -> dict[str, Scheme]:
    """More layers that ignore or lose channels: readers of chosen ones, and 1x1 convs whose channels are free."""
    routes = free_routes(model, input_size)
    own = replace(scheme, shapes=(("1x1", Fraction(1)), (NONE, Fraction(1))))
    others = [name for name in routes if widen and name not in chosen]
    more = {name: own for name in others if _is_pointwise(model.get_submodule(name))}
    sources = {*chosen, *more}
    for reader in [one.name for name, route in routes.items() if name in sources for one in route.readers]:
        if reader not in sources:  # it learns no shapes, and keeps its kernel
            height, width = getattr(model.get_submodule(reader), "kernel_size", (1, 1))
            more[reader] = replace(scheme, shapes=((f"{height}x{width}", Fraction(1)),))
    return more


def _is_pointwise(layer: nn.Module) -> bool:
    form = form_of(layer) if isinstance(layer, nn.Conv2d) and layer.weight.requires_grad else None
    return form is not None and form.kernel == (1, 1) and form.groups == 1


@torch.no_grad()
def layer_inputs(network: nn.Module, names: Sequence[str], image: Tensor) -> dict[str, Tensor]:
    """The input of each layer when the network runs on an image; layers that do not run are left out."""
    seen: dict[str, Tensor] = {}
    with watched({name: network.get_submodule(name) for name in names}, seen.__setitem__), unchanged(network):
        network(*copied(image))
    return seen


# The cost of each shape, counted or measured.


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


@torch.no_grad()
def time_costs(network: nn.Module, dense: nn.Module, image: Tensor) -> ShapeCosts:
    """Milliseconds on a batch of images: each conv with filters of one shape, and with all shapes.

    Several shapes take longer than their shares of the time, because each is a conv of its own: the measured
    difference is divided among the shapes beyond the first. The time is linear in the number of filters and of
    input channels. The rest is the time of the whole dense network less that of its layers.
    """
    twin = _placed(dense, image)
    whole = _measured({"": _deployed(twin, image)}, image)[""]
    layers, filters, splits, spent = shaped_convs(network), {}, {}, 0.0
    for name, x in layer_inputs(twin, [*layers], image).items():
        layer = layers[name]
        mixed = layer.shapes[: layer.out_channels]
        parts = {shape: len(range(place, layer.out_channels, len(mixed))) for place, shape in enumerate(mixed)}
        counts = {shape: {shape: layer.out_channels} for shape in (*layer.shapes, layer.form.kernel)}
        runs = {one: _layer_run(layer, of, x) for one, of in {**counts, None: parts}.items()}
        times = _measured(runs, x, budget=1.0)
        filters[name] = tuple(times[shape] / layer.out_channels for shape in layer.shapes)
        shares = sum(times[shape] * count for shape, count in parts.items()) / layer.out_channels
        splits[name] = max(0.0, times[None] - shares) / max(1, len(parts) - 1)
        spent += times[layer.form.kernel]
    return ShapeCosts("latency", filters, {}, max(0.0, whole - spent), max(whole, spent), splits)


def _measured(runs: Mapping[Key, Callable[[], object]], x: Tensor, *, budget: float = 2.0) -> dict[Key, float]:
    """Milliseconds: on a CPU the least, because other processes interrupt networks more often than layers."""
    if x.is_cuda:
        times = measure(runs, repeats=15, budget=budget, cuda=True)
    else:
        times = measure(runs, repeats=31, budget=budget, of=min)
    return {name: one.ms for name, one in times.items()}


def _deployed(network: nn.Module, image: Tensor) -> Callable[[], object]:
    """A network as it is deployed: on a GPU through `optimize`, in one CUDA graph."""
    fast = optimize(network, image, compile=False) if image.is_cuda else network
    return lambda: fast(image)


def _layer_run(layer: ShapedConv2d, counts: Mapping[Kernel, int], x: Tensor) -> Callable[[], object]:
    """A layer with these filters, to be timed: on a GPU inside a CUDA graph, where launches take no time."""
    conv = in_channels_last(exact_scheme([*counts.items()]).build_form(layer.form).eval()).to(x)
    return captured(lambda: conv(x)).replay if x.is_cuda else lambda: conv(x)


def _placed(model: nn.Module, image: Tensor) -> nn.Module:
    return in_channels_last(copy_with(model).eval().to(image.device, image.dtype))


@dataclass
class ShapeRun:
    """A run that learns shapes, and the callback of `fit` that chooses them after each of the first epochs.

    `asked` is written into the directory of the run together with the costs of shapes. A resumed run reads these,
    because times measured twice differ; it must ask for the same. Times are measured on `device`, with `batch`
    images at a time. `epochs` are those of this process.
    """

    model: nn.Module
    size: tuple[int, ...]
    budget: Budget
    asked: Mapping[str, Any]
    recipe: Recipe
    data: Data
    loss: Loss
    directory: RunDirectory | None = None
    device: str = "auto"
    batch: int | None = None
    epochs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.batch is not None:
            check_number("batch", self.batch, least=1, whole=True)
        self.path = self.directory.path / COSTS if self.directory else None

    @property
    def changes_until(self) -> int:
        """The epoch after which shapes are chosen for the last time."""
        return max(1, round(CHOOSING * self.recipe.epochs))

    def begin(self, shaped: nn.Module, *, resume: bool) -> None:
        """Find the costs of shapes, which the first process does for all, and check that the budget can be met."""
        # Layers that train have hooks, which take time: networks are timed as copies of this one.
        self.blank, self.routes = copy_with(shaped), free_routes(shaped, self.size)
        self.costs = made_by_first(partial(self._find_costs, shaped, resume), self.device)
        chooser = ShapeChooser(shaped, self.routes, self.costs)
        removes = any(may_remove(layer.scheme) for layer in shaped_convs(shaped).values())
        if removes and not any(layer.removable for layer in chooser.layers.values()):
            why = why_fixed(shaped, self.size) or "their channels meet others or reach the output"
            raise LowRankError(f'no filters of this network can be removed, because {why}: leave "none" out.')
        if self.budget.share < (least := chooser.least()):
            more = "" if removes else ', or let filters go by the shape "none"'
            raise LowRankError(
                f"{self.budget.kind}={self.budget.share:g} is below {least:.3f}, what the cheapest shapes and all "
                f"else cost: ask for more{more}."
            )
        if self.path and first_process() and not (self.path.is_file() and self._holds_run):
            write_json(self.path, {"asked": dict(self.asked), "costs": asdict(self.costs)})

    def __call__(self, row: Epoch, network: nn.Module) -> None:
        self.epochs.append(row.epoch)
        if row.epoch > self.changes_until:
            return
        damage = measure_damage(network, self.routes, self.sample(row.epoch, network), self.loss)
        chooser = ShapeChooser(network, self.routes, self.costs, damage)
        if row.epoch == self.changes_until and self.budget.kind == "latency":
            self.choose_last(chooser.choose, network)
        else:
            chooser.choose(self.budget.share)
        if row.epoch < self.changes_until:
            _shrink(network, (row.epoch / self.changes_until) ** 2)
        _agree(network)

    def sample(self, epoch: int, network: nn.Module) -> Iterable[tuple[Tensor, Any]]:
        """A few batches of training images, prepared as in training; they change after each epoch."""
        card = carried_by(network)
        images = min(self.recipe.batch_size, IMAGES)  # the batches of fast recipes would take a third of a run
        # Of these images alone a loader is made: one of all images would send the whole set to the device.
        order = torch.randperm(len(self.data.train), generator=generator("shapes", _SEED, epoch))
        loader = make_loader(
            self.data.train.subset(order[: SAMPLED * images]),
            batch_size=images,
            preprocess=card.preprocess if card else None,
            augment=augmentation(self.recipe),
            train=True,
            device=next(network.parameters()).device,
            seed=_SEED + epoch,
        )
        return loader.epoch(0)

    def choose_last(self, choose: Callable[[float], Any], network: nn.Module) -> None:
        """Choose for the last time, within less than the budget if the network is measured to take longer.

        If no try is within the budget, the fastest is taken. Its share is written down, so that a run that is
        killed before its next checkpoint chooses the same again.
        """
        known = made_by_first(self._last_share, self.device)
        if known is not None:
            choose(known)
            return
        share, tried = self.budget.share, {}
        for _ in range(_TRIES):
            choose(share)
            self.blank.load_state_dict(network.state_dict())
            tried[share] = taken = self.time_of(self.blank) or 0.0
            if not self.exceeded_by(taken):
                break
            share *= max(_FURTHEST, self.budget.share / taken)
        best = min(tried, key=lambda share: tried[share])
        if best != share:
            choose(best)
        if self.path and first_process():
            write_json(self.path, {**read_json(self.path), _LAST: best})

    def time_of(self, network: nn.Module) -> float | None:
        """The measured time of a network as a share of the dense one's; None for a budget of MACs."""
        if self.budget.kind != "latency":
            return None
        device = torch.device(resolve_device(self.device))
        before = generator_states(device)
        try:
            return made_by_first(lambda: self._time_share(finalize_shapes(network, self.size)), self.device)
        finally:
            restore_generators(before, device)  # a run draws the same numbers whether it is timed or not

    def exceeded_by(self, time: float) -> bool:
        """Whether a measured share of the time is above the budget, by more than times differ."""
        return time > (1 + _CLOSE) * self.budget.share

    @torch.no_grad()
    def _time_share(self, network: nn.Module) -> float:
        images = self._images()
        ours, theirs = (_deployed(_placed(one, images), images) for one in (network, self.model))
        times = _measured({"ours": ours, "theirs": theirs}, images)
        return times["ours"] / times["theirs"]

    def _images(self) -> Tensor:
        """The batch to time networks on; GPUs compute in bf16."""
        device = resolve_device(self.device)
        dtype = torch.bfloat16 if device.startswith("cuda") else next(self.model.parameters()).dtype
        batch = self.batch or (1 if device == "cpu" else BATCH)
        return torch.randn(batch, *self.size, device=device, dtype=dtype)

    @property
    def _holds_run(self) -> bool:
        return self.directory is not None and self.directory.holds_run()

    def _last_share(self) -> float | None:
        return read_json(self.path).get(_LAST) if self.path and self.path.is_file() else None

    def _find_costs(self, shaped: nn.Module, resume: bool) -> ShapeCosts:
        """The costs of the run that is resumed, which must ask for the same, or those that are found now."""
        if self.directory and not resume:
            self.directory.check_free()
        if not (resume and self._holds_run and self.path and self.path.is_file()):
            if self.budget.kind == "macs":
                return mac_costs(shaped, self.model, self.size)
            return time_costs(shaped, self.model, self._images())
        try:
            found = read_json(self.path)
            asked, costs = dict(found["asked"]), ShapeCosts(**found["costs"])
            known = {name: len(prices) for name, prices in costs.filters.items()}
        except (UnreadableError, ValueError, TypeError, KeyError, AttributeError) as error:
            told = f"{self.path} holds no costs of shapes: remove it, and they are found anew."
            raise LowRankError(told) from error
        names = {*asked, *self.asked}
        differ = {n: (asked.get(n), self.asked.get(n)) for n in names if asked.get(n) != self.asked.get(n)}
        if differ:
            raise LowRankError(f"the run in {self.path.parent} learns shapes with {in_words(differ)}.")
        if known != {name: len(layer.shapes) for name, layer in shaped_convs(shaped).items()}:
            raise LowRankError(f"{self.path} holds the costs of another network: choose another {option('out')}.")
        return costs


def _shrink(network: nn.Module, share: float) -> None:
    """Shrink the taps outside the shapes that were chosen, and use all taps again."""
    for layer in network.modules():
        if isinstance(layer, ShapedConv2d):
            layer.shrink_outside(share)
        elif isinstance(layer, GatedLinear):
            layer.inputs.fill_(True)


def _agree(network: nn.Module) -> None:
    """Copy the choice of the first process to all: sums on GPUs may differ in their last bits."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    for module in network.modules():
        for name in ("choice", "kept", "inputs") if isinstance(module, ShapedConv2d | GatedLinear) else ():
            buffer = getattr(module, name, None)
            if buffer is not None:
                value = buffer.long()
                torch.distributed.broadcast(value, 0)
                buffer.copy_(value)
