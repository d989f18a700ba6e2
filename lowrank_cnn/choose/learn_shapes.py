"""`learn_shapes`: train a network whose filters choose their own shapes, within a budget of MACs or time.

The network starts dense. After each epoch of the first part of training, every filter chooses its best shape anew,
and the taps outside it shrink, more after every epoch. The last choice drops them. The rest of the run trains the
filters with their final shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.choose.shape_choice import ShapeChooser, check_reachable, check_removable
from lowrank_cnn.choose.shape_costs import ShapeBudget, shape_network
from lowrank_cnn.choose.shape_damage import damage_by_loss
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.data import Data, make_loader
from lowrank_cnn.data.own import for_classes
from lowrank_cnn.data.types import generator
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.channels import free_routes
from lowrank_cnn.method.count import count
from lowrank_cnn.method.finalize_shapes import LearnedShapes, settle
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.schemes import Learned as LearnedScheme
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.select import Where, check_rewritable
from lowrank_cnn.method.shaped_layers import GatedLinear, ShapedConv2d, may_remove
from lowrank_cnn.train.distributed import generator_states, restore_generators
from lowrank_cnn.train.fit import fit, recipe_for
from lowrank_cnn.train.inputs import augmentation, image_size, open_for
from lowrank_cnn.train.objective import Loss, class_scores
from lowrank_cnn.train.optimizers import flags_restored, freeze_parameters
from lowrank_cnn.train.progress import Lines, Progress
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import Epoch, Record, RunDirectory
from lowrank_cnn.train.trained import carried_by, load_checkpoint

CHOOSING = 0.6
"""The share of the epochs after which shapes are final."""


@dataclass(frozen=True)
class ShapeSchedule:
    """The callback of `fit` that chooses shapes after each of the first epochs."""

    chooser: ShapeChooser
    target: float
    epochs: int
    sample: Callable[[int, nn.Module], Iterator[tuple[Tensor, Any]]]
    """Batches after an epoch, to measure the damage of shapes on."""
    loss: Loss
    choose_last: Callable[[Callable[[float], Any], nn.Module], None] | None = None
    """Makes the last choice, with a function that chooses shapes within a share; by default within the target."""
    met: list[int] = field(default_factory=list)
    """The epochs of this process."""

    @property
    def changes_until(self) -> int:
        """The epoch after which shapes are chosen for the last time."""
        return max(1, round(CHOOSING * self.epochs))

    def __call__(self, row: Epoch, network: nn.Module) -> None:
        self.met.append(row.epoch)
        if row.epoch > self.changes_until:
            return
        damage = damage_by_loss(network, self.chooser.routes, self.sample(row.epoch, network), self.loss)
        last = row.epoch == self.changes_until
        if last and self.choose_last is not None:
            self.choose_last(lambda share: self.chooser.choose(network, share, damage), network)
        else:
            self.chooser.choose(network, self.target, damage)
        if not last:
            _shrink(network, (row.epoch / self.changes_until) ** 2)
        _agree(network)


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
        for name in ("choice", "kept", "inputs"):
            buffer = getattr(module, name, None)
            if isinstance(module, ShapedConv2d | GatedLinear) and buffer is not None:
                value = buffer.long()
                torch.distributed.broadcast(value, 0)
                buffer.copy_(value)


SHAPES = ("kx1", "1xk", "1x1", "kxk")
SAMPLED, IMAGES, _SEED = 8, 128, 24
"""Batches that the damage of shapes is measured on, the most images in each, and the seed of their order."""
FOUND = "shapes.json"
"""The result, in the directory of a run."""


@dataclass(frozen=True)
class Learned:
    """The result of learning shapes.

    - `network`: the trained network, of plain convs and composites.
    - `shapes`: the filters of each layer; `shapes.apply(dense)` gives a fresh network to train from scratch.
    - `macs`: the share of the dense network's MACs that is left; None where they cannot be counted.
    - `record`: the record of the run.
    - `time`: for a budget of time, the share of the dense network's that the whole network was measured to take.
    """

    network: nn.Module
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
            "learn_shapes needs a budget below 1: macs=0.4 or latency=0.5, as a share of the dense."
        )
    fields = {name: options.pop(name, None) for name in ("batch_size", "lr", "quantize")}
    recipe = recipe_for(data, recipe, {**fields, "epochs": epochs})
    scheme = learned_scheme(shapes, multiple)
    _check_asked(model, recipe, by)
    directory = None if out is None else RunDirectory(Path(out))
    if directory and not resume and isinstance(data, str | Path):
        directory.check_apart_from(data)
    data = open_for(model, data, recipe)
    if options.get("loss") is None:
        data = for_classes(data)
    size = image_size(data.test, augmentation(recipe))
    shaped = _shaped(model, scheme, size, where, recipe)
    asked = {budget.kind: budget.share, "by": by, "shapes": str(scheme)}
    plan = ShapeBudget(asked, directory, device, batch)
    say = (Lines() if options.get("progress", True) and first_process() else Progress()).say
    if budget.kind == "latency":
        say("Every shape in every layer is timed first.")
    chooser = ShapeChooser(free_routes(shaped, size), plan.costs(shaped, model, size, resume=resume))
    if may_remove(scheme):
        check_removable(chooser, shaped, size)
    check_reachable(chooser, shaped, budget.share)
    if first_process():
        plan.keep(chooser.costs)
    last = None
    if budget.kind == "latency":
        last = partial(plan.choose_last, blank=copy_with(shaped), model=model, size=size)
    loss = options.get("loss") or partial(_cross_entropy, output=recipe.output)
    schedule = ShapeSchedule(chooser, budget.share, recipe.epochs, partial(_sample, data, recipe), loss, last)
    run = {**options, "out": out, "resume": resume, "device": device}
    record = fit(shaped, data, recipe, callbacks=(schedule, *callbacks), **run)
    if len(record.history) < schedule.changes_until:  # a callback or `early_stop` ended it
        raise LowRankError(
            f"the run was ended after epoch {len(record.history)}, and shapes are final after epoch "
            f"{schedule.changes_until}: let it go on."
        )
    if not schedule.met and out is not None:  # the run was finished before
        shaped = load_checkpoint(out, network=shaped).network
    found = _finished(model, shaped, size, record, plan)
    if found.time is not None and plan.exceeded_by(found.time):
        say(f"The network takes {found.time:.2f} of the time, and {budget.share:g} was asked for.")
    return found


def _check_asked(model: nn.Module, recipe: Recipe, by: str) -> None:
    """Refuse impossible requests before images are read."""
    if recipe.epochs < 2:
        raise LowRankError("learning shapes takes two epochs at least: one to choose them, one to train them.")
    if by != "proximal":
        raise LowRankError(f'by={by!r} is not available: shapes are learned by="proximal" alone.')
    check_rewritable(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("there are no weights to train: the network is on the meta device.")


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


def _sample(data: Data, recipe: Recipe, epoch: int, network: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """A few batches of training images, prepared as in training; they change after each epoch."""
    card = carried_by(network)
    device = next(network.parameters()).device
    images = min(recipe.batch_size, IMAGES)  # the batches of fast recipes would take a third of a run's time
    # Of these images alone a loader is made: one of all images would send the whole set to the device each time.
    order = torch.randperm(len(data.train), generator=generator("shapes", _SEED, epoch))
    loader = make_loader(
        data.train.subset(order[: SAMPLED * images]),
        batch_size=images,
        preprocess=card.preprocess if card else None,
        augment=augmentation(recipe),
        train=True,
        device=device,
        seed=_SEED + epoch,
    )
    before = generator_states(device)
    yield from loader.epoch(0)
    restore_generators(before, device)


def _cross_entropy(outputs: Any, targets: Tensor, *, output: str | None) -> Tensor:
    return functional.cross_entropy(class_scores(outputs, output).float(), targets)


def learned_scheme(shapes: Sequence[str] | Scheme, multiple: int = 8) -> Scheme:
    """The scheme of these shapes; a scheme is returned as it is."""
    if isinstance(shapes, LearnedScheme):
        return shapes
    if isinstance(shapes, str | Scheme) or not all(isinstance(shape, str) for shape in shapes):
        raise LowRankError(f'shapes are a list like ("kx1", "1xk", "kxk", "none"), not {shapes!r}.')
    found = Scheme("learned", tuple((shape, Fraction(1)) for shape in dict.fromkeys(shapes)), multiple=multiple)
    return parse_scheme(str(found))


def _finished(
    model: nn.Module, shaped: nn.Module, size: tuple[int, ...], record: Record, plan: ShapeBudget
) -> Learned:
    network = settle(shaped, size)
    shapes = LearnedShapes.of(network)
    if plan.directory and first_process():
        shapes.save(plan.directory.path / FOUND)
    macs = None
    with contextlib.suppress(LowRankError):  # a forward that reads values cannot be counted
        macs = count(network, size).macs / count(model, size).macs
    return Learned(network, shapes, macs, record, plan.time_of(network, model, size))
