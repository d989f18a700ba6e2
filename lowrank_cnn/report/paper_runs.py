"""Which runs tell of a published accuracy: the same network, images and recipe."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from lowrank_cnn.models import family_of
from lowrank_cnn.paper.auditing import Accuracies, LayerTimes
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.fields import number
from lowrank_cnn.report.records import Run, TimedNetwork, by_seed
from lowrank_cnn.report.training_record import settings_of
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recipes import get_recipe

RECIPES = {
    "vgg-ilsvrc": "vgg-paper",
    "googlenet-ilsvrc": "googlenet-paper",
    "nin-cifar10": "nin-paper",
    "vgg-places": "vgg-paper",
}
"""What the networks of a table are trained by."""

OWN = ("dropout", "precision", "epochs", "images")
"""Settings that a network or a machine has for itself; a run may be longer than the recipe, and no shorter."""


def accuracies(runs: Iterable[Run]) -> Accuracies:
    """The accuracies of finished runs that the audit can compare with the paper's tables, one value per seed.

    Runs of a row that saw different images are not mixed: those of the images with the most seeds count.
    """
    found: dict[tuple[str, str, str], tuple[float, ...]] = {}
    told = [run for run in runs if run.finished]
    for row in (row for row in rows() if row.table in RECIPES):
        images: dict[str, list[Run]] = {}
        for run in (run for run in told if _is_of(run, row)):
            images.setdefault(run.images, []).append(run)
        chosen = max(images.values(), key=lambda group: len({run.seed for run in group}), default=[])
        for measure in ("top1", "top5", "overfit"):
            if values := by_seed(chosen, measure):
                found[row.table, row.network, measure] = tuple(values)
    return found


def layer_times(timings: Iterable[TimedNetwork]) -> list[LayerTimes]:
    """Layer times of every network and kind of device, the fastest of each."""
    fastest: dict[tuple[str, str], TimedNetwork] = {}
    for timing in sorted(timings, key=lambda timing: -timing.ms_per_image):
        if timing.layers:
            fastest[timing.network.label, timing.device] = timing
    return [
        LayerTimes(network, device, *zip(*((float(layer.macs), layer.ms) for layer in timing.layers), strict=True))
        for (network, device), timing in sorted(fastest.items())
    ]


def _is_of(run: Run, row: Published) -> bool:
    """Whether a run trained the network of a row, as published, on the images of its table, by its recipe."""
    built, recipe = run.network, RECIPES[row.table]
    if built.name != row.network or run.recipe != recipe or data_label(run.data) != data_label(row.dataset):
        return False
    own_stride = family_of(row.network).VARIANTS[row.network].stride
    as_published = built.width == 1 and not (built.scheme or built.base)
    return as_published and (built.stride or own_stride) == row.stride and _as_taught(run, recipe)


def _as_taught(run: Run, recipe: str) -> bool:
    """Whether a run kept to its recipe; what an older record lacks had its default."""
    told, default, wanted = dict(run.settings), _settings(Recipe()), _settings(get_recipe(recipe))
    kept = all(told.get(name, default[name]) == value for name, value in wanted.items() if name not in OWN)
    if "begun_from" in told:
        return False
    try:
        epochs = number(float(told.get("epochs", "")))
    except ValueError:
        return False
    return kept and epochs is not None and epochs >= get_recipe(recipe).epochs


@cache
def _settings(recipe: Recipe) -> dict[str, str]:
    """A recipe, and a network that it is for, as the settings of a run."""
    return dict(settings_of(recipe.to_dict(), recipe.network(), {}))
