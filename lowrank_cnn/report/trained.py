"""Which runs tell of a published accuracy: the same network, images and recipe."""

from __future__ import annotations

from collections.abc import Iterable

from lowrank_cnn.paper.audit import Trained
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.charts import data_label
from lowrank_cnn.report.records import Run
from lowrank_cnn.train.recipes import get_recipe

RECIPES = {
    "vgg-ilsvrc": "vgg-paper",
    "googlenet-ilsvrc": "googlenet-paper",
    "nin-cifar10": "nin-paper",
    "vgg-places": "vgg-paper",
}
"""What the networks of a table are trained by."""


def trained(runs: Iterable[Run]) -> Trained:
    """The accuracies of finished runs that the audit can hold against the paper's tables."""
    found: dict[tuple[str, str, str], tuple[float, ...]] = {}
    told = [run for run in runs if run.finished]
    for row in rows():
        for run in (run for run in told if _is_of(run, row)):
            for measure in ("top1", "top5"):
                if (value := getattr(run, measure)) is not None:
                    key = (row.table, row.network, measure)
                    found[key] = (*found.get(key, ()), value)
    return found


def _is_of(run: Run, row: Published) -> bool:
    """Whether a run trained the network of a row, whole, on the images of its table, and as long."""
    recipe = RECIPES.get(row.table)
    if recipe is None or run.recipe != recipe or data_label(run.data) != data_label(row.dataset):
        return False
    whole = run.built.name == row.network and run.built.width == 1 and not run.built.scheme
    epochs = dict(run.settings).get("epochs", "0")
    return whole and (run.built.stride or 1) == row.stride and float(epochs) >= get_recipe(recipe).epochs
