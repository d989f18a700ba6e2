"""`learn_shapes`: train a network whose filters choose their own shapes, within a budget of MACs.

The network starts dense. After each epoch of the first part of training, every filter chooses its best shape anew,
and the taps outside it shrink, more after every epoch. The last choice drops them. The rest of the run trains the
filters with their final shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.choose.shape_choice import ShapeChooser, ShapeCosts, measure_views
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.files import UnreadableError, read_json, write_json
from lowrank_cnn.core.modules import watched
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.data import Data, make_loader
from lowrank_cnn.data.own import for_classes
from lowrank_cnn.data.types import generator
from lowrank_cnn.graph.channels import Route, free_routes
from lowrank_cnn.graph.finalize_shapes import LearnedShapes, finalize_shapes
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.count import count
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.rewrite import copy_with, frozen_like, rewrite
from lowrank_cnn.method.schemes import Learned as LearnedScheme
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.select import Where, check_rewritable, select
from lowrank_cnn.method.shaped_layers import shaped_convs
from lowrank_cnn.train.fit import fit, recipe_for
from lowrank_cnn.train.inputs import augmentation, image_size, open_for
from lowrank_cnn.train.objective import Loss, class_scores
from lowrank_cnn.train.optimizers import flags_restored, freeze_parameters
from lowrank_cnn.train.recipe import Recipe, in_words
from lowrank_cnn.train.run_folder import Epoch, Record, RunDirectory
from lowrank_cnn.train.trained import carried_by, load_checkpoint

SHAPES = ("kx1", "1xk", "1x1", "kxk")
CHOOSING = 0.6
"""The share of the epochs after which shapes are final."""
SAMPLED, IMAGES, _SEED = 8, 128, 24
"""Batches that views are measured on, the most images in each, and the seed of their order."""
FOUND, ASKED = "shapes.json", "shape_budget.json"
"""Files in the directory of a run: the result, and the request, which a resumed run has to repeat."""


@dataclass(frozen=True)
class Learned:
    """The result of learning shapes.

    - `network`: the trained network, of plain convs and composites.
    - `shapes`: the filters of each layer; `shapes.apply(dense)` gives a fresh network to train from scratch.
    - `macs`: the share of the dense network's MACs that is left.
    - `record`: the record of the run.
    """

    network: nn.Module = field(repr=False)
    shapes: LearnedShapes
    macs: float
    record: Record


def learn_shapes(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str = "modern",
    *,
    macs: float | None = None,
    shapes: Sequence[str] | Scheme = SHAPES,
    multiple: int = 8,
    where: Where = None,
    epochs: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Learned:
    """Train a copy of a dense network whose filters learn their shapes, within a share of its MACs.

    >>> learned = learn_shapes(net, "photos", macs=0.4, out="runs/photos")  # doctest: +SKIP
    >>> print(learned.shapes)  # doctest: +SKIP

    - `macs`: the share that is left at the end.
    - `shapes`: a filter may take these, in terms of the layer's k x k: "kx1", "1xk", "1x1", "kxk", "5x1"...
    - `multiple`: filters of one shape come in multiples of this.
    - `where`: the convs that learn, as for `convert`.

    All else goes to `fit`: `out` and `resume` for a run that survives interruptions, `callbacks`, `seed`.
    Layers whose channels are added to others keep the order of their filters: a shape there has one run of them.
    The network returned has no masks; it was compared with the one that was trained, in float64.
    """
    budget = Budget.of(macs=macs)
    if budget is None or budget.share == 1:
        raise LowRankError(f"learn_shapes needs a budget below 1: {option('macs', 0.4)}.")
    fields = {name: options.pop(name, None) for name in ("batch_size", "lr", "quantize")}
    recipe = recipe_for(data, recipe, {**fields, "epochs": epochs})
    scheme = learned_scheme(shapes, multiple)
    if recipe.epochs < 2:
        raise LowRankError("learning shapes takes two epochs at least: one to choose them, one to train them.")
    check_rewritable(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("there are no weights to train: the network is on the meta device.")
    directory = RunDirectory.open(out, data, resume=resume)
    data = open_for(model, data, recipe)
    if options.get("loss") is None:
        data = for_classes(data)
    size = image_size(data.test, augmentation(recipe))
    shaped = _shaped(model, scheme, size, where, recipe)
    routes, costs = free_routes(shaped, size), mac_costs(shaped, model, size)
    if budget.share < (least := ShapeChooser(shaped, routes, costs).least()):
        told = f"macs={budget.share:g} is below {least:.3f}, what the cheapest shapes and all else cost"
        raise LowRankError(f"{told}: ask for more.")
    if directory:
        _check_request(directory, {"macs": budget.share, "shapes": str(scheme)}, resume=resume)
    loss = options.get("loss") or partial(cross_entropy, output=recipe.output)
    run = ShapeRun(routes, costs, budget.share, recipe, data, loss)
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
    return Learned(network, found, count(network, size).macs / count(model, size).macs, record)


def _check_request(directory: RunDirectory, asked: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse to resume a run with another budget or other shapes; write down those of a new one."""
    path = directory.path / ASKED
    if not resume:
        directory.check_free()
    elif directory.holds_run() and path.is_file():
        try:
            known = dict(read_json(path))
        except (UnreadableError, ValueError, TypeError) as error:
            raise LowRankError(f"{path} is damaged: it held the budget and the shapes of this run.") from error
        if differ := {name: (known.get(name), value) for name, value in asked.items() if known.get(name) != value}:
            raise LowRankError(f"the run in {path.parent} learns shapes with {in_words(differ)}.")
        return
    if first_process():
        write_json(path, dict(asked))


def learned_scheme(shapes: Sequence[str] | Scheme, multiple: int = 8) -> Scheme:
    """The scheme of these shapes; a scheme is returned as it is."""
    if isinstance(shapes, LearnedScheme):
        return shapes
    if isinstance(shapes, str | Scheme) or not all(isinstance(shape, str) for shape in shapes):
        raise LowRankError(f'shapes must be a list such as ("kx1", "1xk", "kxk"), not {shapes!r}.')
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

    def fill(_: str, layer: nn.Module, new: nn.Module) -> None:
        new.copy_dense(layer.weight, layer.bias)  # type: ignore[operator]
        frozen_like(layer, new)

    new = rewrite(model, schemes, fill=fill, kept=kept)
    note(new, input_size=tuple(input_size))
    return new


@torch.no_grad()
def layer_inputs(network: nn.Module, names: Sequence[str], image: Tensor) -> dict[str, Tensor]:
    """The input of each layer when the network runs on an image; layers that do not run are left out."""
    seen: dict[str, Tensor] = {}
    with watched({name: network.get_submodule(name) for name in names}, seen.__setitem__), unchanged(network):
        network(*copied(image))
    return seen


def mac_costs(network: nn.Module, dense: nn.Module, input_size: Sequence[int]) -> ShapeCosts:
    """The multiply-accumulates of one image: those of a filter of each shape, and of everything else."""
    found = count(dense, input_size)
    macs = {row.name: row.macs for row in found.layers}
    filters = {}
    for name, layer in shaped_convs(network).items():
        taps = layer.form.kernel[0] * layer.form.kernel[1]
        tap = macs.get(name, 0) / taps / layer.out_channels
        filters[name] = tuple(tap * height * width for height, width in layer.shapes)
    rest = found.macs - sum(macs.get(name, 0) for name in filters)
    return ShapeCosts(filters, float(rest), float(found.macs))


@dataclass
class ShapeRun:
    """The callback of `fit` that chooses shapes after each of the first epochs; `epochs` are those it has seen."""

    routes: Mapping[str, Route]
    costs: ShapeCosts
    macs: float
    recipe: Recipe
    data: Data
    loss: Loss
    epochs: list[int] = field(default_factory=list, init=False)

    @property
    def changes_until(self) -> int:
        """The epoch after which shapes are chosen for the last time."""
        return max(1, round(CHOOSING * self.recipe.epochs))

    def __call__(self, row: Epoch, network: nn.Module) -> None:
        self.epochs.append(row.epoch)
        if row.epoch > self.changes_until:
            return
        views = measure_views(network, self.routes, self.sample(row.epoch, network), self.loss)
        ShapeChooser(network, self.routes, self.costs, views).choose(self.macs)
        if row.epoch < self.changes_until:
            for layer in shaped_convs(network).values():
                layer.shrink_outside((row.epoch / self.changes_until) ** 2)
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


def _agree(network: nn.Module) -> None:
    """Copy the choice of the first process to all: sums on GPUs may differ in their last bits."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for layer in shaped_convs(network).values():
            torch.distributed.broadcast(layer.choice, 0)
