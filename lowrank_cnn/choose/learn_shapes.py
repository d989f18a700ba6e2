"""Train a network whose filters choose their own shapes, within a budget of MACs.

The network starts dense. After each epoch of the first part of training, every filter chooses its best shape anew,
and the taps outside it shrink, more after every epoch. The last choice drops them. The rest of the run trains the
filters with their final shapes.

Gradients on a few batches tell what a filter keeps with each shape. A tap counts by the squared change of the loss
if it is removed, to first order (Molchanov et al. 2019). The choice maximises

    sum over layers of log(worth of the layer)  -  lambda * cost

with the one lambda, found by bisection, at which the network meets its budget.

A layer has views, the rows and columns of its kernel. Its worth is the sum over views of their importance times a
concave value of the share that is kept: the first filters that keep a view add most. A layer of similar filters
therefore gets some vertical and some horizontal ones, although each filter alone would take the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import log1p, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

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
from lowrank_cnn.method.count import Count, count
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.rewrite import copy_with, frozen_like, rewrite
from lowrank_cnn.method.schemes import Learned as LearnedScheme
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.select import Where, check_rewritable, select
from lowrank_cnn.method.shaped_layers import ShapedConv2d, shaped_convs
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
_TINY = 1e-30
_COMMON = 0.05
"""The part of an average filter that is added to every filter: one without gradients follows the others."""
_CURVE = 2.0
"""The first filters that keep a view add 1 + this many times as much as the last."""
_GAIN = 1e-9
"""The smallest gain that justifies a change: smaller ones are rounding."""
_STEPS = 24
"""Bisections: they find a price among fifteen powers of ten to five digits."""
_CHEAPEST, _DEAREST = 1e-6, 1e9
"""Prices of the whole dense network. The least is above zero: of two shapes that keep all, the cheaper wins."""
_LEFT = 0.02
"""The share of a budget that is not worth spending."""


@dataclass(frozen=True)
class Learned:
    """The trained network of plain convs and composites, its shapes, and the record of the run.

    - `shapes`: the filters of each layer; `shapes.apply(dense)` gives a fresh network to train from scratch.
    - `macs`: the share of the dense network's MACs that is left.
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
    scheme = _learned_scheme(shapes, multiple)
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
    routes, dense = free_routes(shaped, size), count(model, size)
    if budget.share < (least := ShapeChooser(shaped, routes, dense).least()):
        told = f"macs={budget.share:g} is below {least:.3f}, what the cheapest shapes and all else cost"
        raise LowRankError(f"{told}: ask for more.")
    if directory:
        _check_request(directory, {"macs": budget.share, "shapes": str(scheme)}, resume=resume)
    run = ShapeRun(routes, dense, budget.share, recipe, data, options.get("loss"))
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
    return Learned(network, found, count(network, size).macs / dense.macs, record)


def _check_request(directory: RunDirectory, asked: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse to resume a run with another budget or other shapes; write down those of a new one."""
    path = directory.path / ASKED
    if not resume:
        directory.check_free()
    elif directory.holds_run() and path.is_file():
        try:
            known = read_json(path)
        except UnreadableError as error:
            raise LowRankError(f"{path} is damaged: it held the budget and the shapes of this run.") from error
        if differ := {name: (known.get(name), value) for name, value in asked.items() if known.get(name) != value}:
            raise LowRankError(f"the run in {path.parent} learns shapes with {in_words(differ)}.")
        return
    if first_process():
        write_json(path, dict(asked))


def _learned_scheme(shapes: Sequence[str] | Scheme, multiple: int) -> Scheme:
    if isinstance(shapes, LearnedScheme):
        return shapes
    if isinstance(shapes, str | Scheme) or not all(isinstance(shape, str) for shape in shapes):
        raise LowRankError(f'shapes must be a list such as ("kx1", "1xk", "kxk"), not {shapes!r}.')
    found = Scheme("learned", tuple((shape, Fraction(1)) for shape in dict.fromkeys(shapes)), multiple=multiple)
    return parse_scheme(str(found))


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


@dataclass
class ShapeRun:
    """The callback of `fit` that chooses shapes after each of the first epochs; `epochs` are those it has seen."""

    routes: Mapping[str, Route]
    dense: Count
    macs: float
    recipe: Recipe
    data: Data
    loss: Loss | None
    epochs: list[int] = field(default_factory=list, init=False)

    @property
    def changes_until(self) -> int:
        """The epoch after which shapes are chosen for the last time."""
        return max(1, round(CHOOSING * self.recipe.epochs))

    def __call__(self, row: Epoch, network: nn.Module) -> None:
        self.epochs.append(row.epoch)
        if row.epoch > self.changes_until:
            return
        loss = self.loss or self._cross_entropy
        views = measure_views(network, self.routes, self.sample(row.epoch, network), loss)
        ShapeChooser(network, self.routes, self.dense, views).choose(self.macs)
        if row.epoch < self.changes_until:
            for layer in shaped_convs(network).values():
                layer.shrink_outside((row.epoch / self.changes_until) ** 2)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for layer in shaped_convs(network).values():  # sums on GPUs may differ in their last bits
                torch.distributed.broadcast(layer.choice, 0)

    def _cross_entropy(self, outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(class_scores(outputs, self.recipe.output).float(), targets)

    def sample(self, epoch: int, network: nn.Module) -> Iterable[tuple[Tensor, Any]]:
        """A few batches of training images, prepared as in training; they change after each epoch."""
        card = carried_by(network)
        images = min(self.recipe.batch_size, IMAGES)  # the batches of fast recipes would take a third of a run
        # A loader of all images would send the whole set to the device.
        order = torch.randperm(len(self.data.train), generator=generator("shapes", _SEED, epoch))
        return make_loader(
            self.data.train.subset(order[: SAMPLED * images]),
            batch_size=images,
            preprocess=card.preprocess if card else None,
            augment=augmentation(self.recipe),
            train=True,
            device=next(network.parameters()).device,
            seed=_SEED + epoch,
        ).epoch(0)


# The views of a layer are [filters, shapes, views]: the part that a filter keeps with each shape once the network
# has adapted. A view is a row or a column of the kernel, and half of each tap belongs to either. A filter keeps
# the rows and columns that its shape reaches: a vertical filter keeps all rows and, followed by a horizontal one
# in the next layer, the corners too. The last view is the part that does not depend on the shape.


def measure_views(
    network: nn.Module,
    routes: Mapping[str, Route],
    batches: Iterable[tuple[Tensor, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[str, Tensor]:
    """The views of each layer by the loss on batches of (images, targets). The network is not changed.

    A layer without gradients is judged by its weights: it leads to an output that has no loss, or all outputs of
    the network are dead.
    """
    layers = shaped_convs(network)
    weights = [layer.weight for layer in layers.values()]
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.training]
    taps = {name: torch.zeros(len(m.weight), *m.kernel_size).double() for name, m in layers.items()}
    channels = {name: torch.zeros(m.in_channels).double() for name, m in layers.items()}
    with flags_restored(network), unchanged(network, evaluating=True), torch.enable_grad():
        for norm in norms:  # by the statistics of the batch, so that a filter's scale does not count
            norm.train()
        for weight in weights:  # frozen ones, too
            weight.requires_grad_(True)
        for images, targets in batches:
            value = loss(network(images), targets)
            slopes = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
            for name, weight, slope in zip(layers, weights, slopes, strict=True):
                change = slope.detach().double() * weight.detach().double()
                taps[name] += change.sum(1).square().cpu()
                channels[name] += change.sum((2, 3)).sum(0).square().cpu()
    found = {}
    for name, layer in layers.items():
        own = taps[name].sum((1, 2))
        read = torch.zeros_like(own)  # the loss without each channel, in all layers that read it
        for reader in routes[name].readers if name in routes else ():
            if reader in channels:
                read += channels[reader].unflatten(0, (len(own), -1)).sum(1)
        whole = torch.maximum(own, read)
        measured = _TINY < float(whole.sum()) < torch.inf
        found[name] = _views(layer, taps[name], whole) if measured else views_by_weights(layer)
    return found


@torch.no_grad()
def views_by_weights(layer: ShapedConv2d) -> Tensor:
    """The views by squared weights, normalised to one per layer."""
    taps = layer.weight.double().square().sum(1).cpu()
    taps /= taps.sum().clamp_min(_TINY)
    return _views(layer, taps, taps.sum((1, 2)))


def _views(layer: ShapedConv2d, taps: Tensor, whole: Tensor) -> Tensor:
    """The views, from the loss without each tap ([filters, height, width]) and without each filter."""
    masks = layer.masks[: len(layer.shapes)].to(taps)
    always = (whole - taps.sum((1, 2))).clamp_min(0)[:, None, None].expand(-1, len(masks), 1)
    taps = taps + _COMMON * taps.mean(0)
    rows, columns = (taps.sum(axis)[:, None] * masks.amax(axis) / 2 for axis in (2, 1))
    return torch.cat([rows, columns, always], 2)


# The choice in one layer, at a price for each filter.


def worth(kept: Tensor, whole: Tensor) -> Tensor:
    """The worth, between 0 and 1, of layers that keep `kept` of `whole`; the last dimension is the view.

    >>> whole = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> worth(whole / 2, whole) > worth(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), whole)
    tensor(True)
    """
    curved = (kept / whole).clamp_(0, 1).mul_(_CURVE).log1p_()
    return curved.mul_(whole / whole.sum()).div_(log1p(_CURVE)).sum(-1)


def pick_units(kept: Tensor, whole: Tensor, price: Tensor) -> Tensor:
    """Argmax of log(worth of the layer) - prices, over the shapes of its units.

    `kept` is [units, shapes, views], `price` is per unit of each shape. The search is greedy: each unit begins
    with its own best shape, then the one change that gains most is made until none gains.

    >>> vertical, horizontal = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([vertical, horizontal], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2)).bincount().tolist()
    [2, 2]
    """
    units, shapes, _ = kept.shape
    choice = (kept.sum(2) / whole.sum() - price).argmax(1)
    current, own, best = kept[torch.arange(units), choice], price[choice], -torch.inf
    while True:
        changed = (current.sum(0) - current)[:, None] + kept
        after = worth(changed, whole).log_() - (own.sum() - own[:, None] + price)
        place = int(after.argmax())
        value = after.view(-1)[place].item()
        if not value > best + _GAIN:
            return choice
        unit, shape = divmod(place, shapes)
        best, choice[unit], current[unit], own[unit] = value, shape, kept[unit, shape], price[shape]


def sort_alike(scores: Tensor) -> Tensor:
    """Sort filters by their best shape, and within a shape by the margin over the second best, largest first."""
    best, shape = scores.max(1)
    second = scores.scatter(1, shape[:, None], -torch.inf).amax(1)
    order = (second - best).argsort(stable=True)
    return order[shape[order].argsort(stable=True)]


def share_out(scores: Tensor, wanted: Tensor) -> Tensor:
    """The shape of each filter by its scores, [filters, shapes], with `wanted` filters of each shape.

    Filters move from shapes that have too many to shapes that have too few, each time at the least loss.

    >>> share_out(torch.tensor([[3.0, 1.0], [1.0, 2.0], [0.0, 9.0], [2.0, 2.1]]), torch.tensor([2, 2])).tolist()
    [0, 1, 1, 0]
    """
    best = choice = scores.argmax(1)
    loss = scores.gather(1, best[:, None]) - scores
    spare = best.bincount(minlength=len(wanted)) - wanted
    for _ in range(int(spare.clamp_min(0).sum())):
        stuck = (spare <= 0)[best] | (choice != best)  # a filter moves once
        place = int(loss.masked_fill(stuck[:, None] | (spare >= 0), torch.inf).argmin())
        choice = choice.index_fill(0, torch.tensor(place // len(wanted)), place % len(wanted))
        spare = choice.bincount(minlength=len(wanted)) - wanted
    return choice


@dataclass(frozen=True)
class LayerChoice:
    """One conv to choose shapes for.

    - `kept`: what each filter keeps with each shape, [filters, shapes, views].
    - `cost`: of one filter of each shape, in MACs.
    - `unit`: filters of one shape come in multiples of this. `free`: filters may be reordered.
    """

    kept: Tensor
    cost: Tensor
    unit: int
    free: bool

    @cached_property
    def whole(self) -> Tensor:
        """All that filters can keep, in each view."""
        return self.kept.amax(1).sum(0)

    def limits(self) -> Iterator[LayerChoice]:
        """The layer with each pair of its shapes alone (all others cost infinitely much), and with all of them."""
        for pair in combinations(range(len(self.cost)), 2):
            cost = torch.full_like(self.cost, torch.inf)
            cost[[*pair]] = self.cost[[*pair]]
            yield replace(self, cost=cost)
        yield self

    def pick(self, price: Tensor) -> LayerPick:
        """The best choice at a price for each filter."""
        kept = self.kept[sort_alike(self.kept.sum(2) / self.whole.sum() - price)] if self.free else self.kept
        units = kept.unflatten(0, (-1, self.unit)).sum(1)
        chosen = pick_units(units, self.whole, self.unit * price)
        together = units[torch.arange(len(chosen)), chosen].sum(0)
        cost = self.unit * float(self.cost[chosen].sum())
        return LayerPick(chosen, price, together / self.whole, float(worth(together, self.whole)), cost)

    def assigned(self, pick: LayerPick) -> Tensor:
        """The shape of each filter by itself."""
        if not self.free:
            return pick.units.sort().values.repeat_interleave(self.unit)
        # The slope of the worth: a view of which little is kept counts more.
        values = (self.kept * (1 / (1 + _CURVE * pick.share))).sum(2) / self.whole.sum()
        return share_out(values - pick.price, self.unit * pick.units.bincount(minlength=len(pick.price)))


@dataclass(frozen=True)
class LayerPick:
    """The shape of each unit of filters in a layer, chosen at a price for a filter of each shape.

    `share` is what is kept of each view; `worth` and `cost` are those of the layer.
    """

    units: Tensor
    price: Tensor
    share: Tensor
    worth: float
    cost: float


Picks = dict[str, LayerPick]


class ShapeChooser:
    """Chooses and sets the shapes of a network, given its free channels, the views of its layers, and dense costs.

    Without `views`, the choice depends on the weights alone.
    """

    def __init__(
        self,
        network: nn.Module,
        routes: Mapping[str, Route],
        dense: Count,
        views: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.convs, self.layers, self.dense = shaped_convs(network), {}, float(dense.macs)
        macs = {row.name: row.macs for row in dense.layers}
        self.rest = float(dense.macs - sum(macs.get(name, 0) for name in self.convs))
        for name, conv in self.convs.items():
            kept = views_by_weights(conv) if views is None else views[name]
            tap = macs.get(name, 0) / prod(conv.form.kernel) / conv.out_channels
            cost = torch.tensor([tap * height * width for height, width in conv.shapes], dtype=torch.float64)
            # A layer that keeps nothing at all has no worth to divide by.
            self.layers[name] = LayerChoice(kept.clamp_min(_TINY), cost, unit_of(conv), name in routes)

    def least(self) -> float:
        """The smallest share of the dense network's cost that any choice has."""
        return self.total(self._pick(self.layers, _DEAREST)) / self.dense

    def choose(self, share: float) -> float:
        """Set shapes that cost at most this share of the dense network, or the least; the share they cost."""
        allowed = share * self.dense * (1 + 1e-9)
        found = self._pick(self.layers, _CHEAPEST)
        if self.total(found) > allowed:
            affordable = self._affordable(self.layers, {}, allowed)
            found = affordable[-1] if affordable else self._pick(self.layers, _DEAREST)
        found = self._spend(found, allowed)
        with torch.no_grad():  # in place, because optimisers and CUDA graphs hold references to the buffers
            for name, pick in found.items():
                self.convs[name].choice.copy_(self.layers[name].assigned(pick))
        return self.total(found) / self.dense

    def total(self, picks: Picks) -> float:
        """The cost of a choice."""
        return self.rest + sum(pick.cost for pick in picks.values())

    def _pick(self, layers: Mapping[str, LayerChoice], price: float) -> Picks:
        """The best choice of each layer at a price of the dense network."""
        return {name: layer.pick(price * layer.cost / self.dense) for name, layer in layers.items()}

    def _affordable(self, layers: Mapping[str, LayerChoice], others: Picks, allowed: float) -> list[Picks]:
        """The choices for some layers, beside the others, that a bisection of the price finds to be allowed.

        The last one has the lowest price.
        """
        low, high, found = _CHEAPEST, _DEAREST, []
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            picks = others | self._pick(layers, middle)
            if self.total(picks) <= allowed:
                high = middle
                found.append(picks)
            else:
                low = middle
        return found

    def _spend(self, found: Picks, allowed: float) -> Picks:
        """Spend the rest of the budget: the layers that lost most choose again, each at a price of its own.

        One price for all leaves a rest, because choices jump as it falls, by a unit of filters or more.
        """
        for name in sorted(self.layers, key=lambda name: found[name].worth):
            for layer in self.layers[name].limits():
                if allowed - self.total(found) < _LEFT * allowed:
                    return found
                for picks in self._affordable({name: layer}, found, allowed):
                    if picks[name].worth > found[name].worth + _GAIN:
                        found = picks
        return found


def unit_of(layer: ShapedConv2d) -> int:
    """The multiple that filters of one shape come in, halved until the layer has four units or more."""
    unit = layer.scheme.multiple or 1
    while unit > 1 and (layer.out_channels % unit or layer.out_channels < 4 * unit):
        unit //= 2
    return unit
