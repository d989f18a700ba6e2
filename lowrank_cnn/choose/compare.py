"""`compare`: which cheap version of a network to train and ship, on your images and where it will run.

The dense network, low-rank ones and thinner ones that run in the time of these are timed first. All are then tried
briefly, by the same learning rates, on images held out of training. The best of each kind are trained several
times, each time with other images held out, which decide. The test images are used once, for the figures in the
answer. All results are in one folder. A comparison that was killed continues there.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.choose.candidates import DENSE, Builder, find_design
from lowrank_cnn.choose.choice import Choice, Contender, Wish, choose, milliseconds
from lowrank_cnn.choose.comparing import Comparing
from lowrank_cnn.choose.frontier import DesignRow, DesignTime, about_runs, in_words, kind_of, open_frontier
from lowrank_cnn.choose.target import Target
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, LowRankWarning, MissingExtra, check_number, option
from lowrank_cnn.core.files import below, locked, write_json
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.progress import lasting, progress, step
from lowrank_cnn.core.text import counted, text_table
from lowrank_cnn.data import Data
from lowrank_cnn.data.own import DatasetSplit, listed_labels
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.thin import fresh
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import name_of, with_classes
from lowrank_cnn.models.foreign import DEFAULT, build_foreign, is_foreign
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.fit import recipe_for
from lowrank_cnn.train.inputs import augmentation, check_classes, check_network, image_size, open_for, trained_on
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import load_record

Model = nn.Module | str | Callable[[], nn.Module]


@dataclass(frozen=True)
class Comparison:
    """The answer: a sentence, a table, and a folder with every run, the record, a picture and a page.

    `winner` is the run folder of the network to take, ready for `lr.export`.
    """

    folder: Path
    choice: Choice
    table: list[dict[str, Any]]
    remarks: tuple[str, ...]
    winner: Path
    picture: Path | None
    page: Path | None

    @property
    def sentence(self) -> str:
        return self.choice.sentence

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The headings and lines of the table."""
        lines = []
        for row in self.table:
            accuracies = (row["accuracy"], row["held_out"])
            shown = ["" if share is None else f"{100 * share:.1f}%" for share in accuracies]
            lines.append((row["network"], f"{row['macs']:.2f}", milliseconds(row["ms"]), *shown, str(row["runs"])))
        return ("network", "MACs", "time", "test", "held out", "runs"), lines

    def __str__(self) -> str:
        names, lines = self.rows()
        table = text_table([names[0], *(f">{name}" for name in names[1:])], lines)
        return "\n".join([table, "", self.sentence, *self.remarks])

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        gap = self.choice.gap
        return {
            "sentence": self.sentence,
            "take": self.choice.taken.name,
            "decided": self.choice.decided,
            "gap": gap and {"points": gap.points, "low": gap.low, "high": gap.high},
            "rows": self.table,
            "remarks": list(self.remarks),
            "folder": str(self.folder),
            "winner": str(self.winner),
            "picture": self.picture and str(self.picture),
            "page": self.page and str(self.page),
        }


def compare(
    model: Model,
    data: Any,
    *,
    out: str | Path = "runs/compare",
    minutes: float | None = None,
    for_: str = "auto",
    at_most: float | None = None,
    at_least: float | None = None,
    schemes: Sequence[str] = (),
    batch: int | None = None,
    recipe: Recipe | str | None = None,
    pretrained: bool | str = False,
    device: str = "auto",
    say: Callable[[str], None] = lasting,
    **settings: Any,
) -> Comparison:
    """Train dense, thinner and low-rank versions of a network, time each where it will run, and say which to take.

    >>> print(compare("nin", "photos", minutes=20, for_="onnxruntime:int8"))  # doctest: +SKIP

    - `model`: a network, a function that makes one, or a text: one of our names, `timm:resnet18`,
      `torchvision:resnet18` or `mynet.py:make_model`. Every run begins with fresh weights, which a function has to
      give. With `pretrained`, the network's own weights (or those named so) are fine-tuned, and cheaper networks
      are decomposed or pruned from the result, which teaches them.
    - `data`: what `fit` takes: a path, what `open_data` gives, data sets of your own. Without any, `design`
      advises from times alone.
    - `out`: the folder of everything. The same call goes on with a comparison that was killed.
    - `minutes`: the budget; by default what the recipe's epochs take, at most an hour.
    - `for_`: where the network will run: "cpu", "cuda", or an engine with a precision ("onnxruntime:int8",
      "ncnn:fp16"), in which accuracy is measured too.
    - `at_most`, `at_least`: the milliseconds that the network may take for a `batch`, the accuracy that it must
      reach, between 0 and 1. Without them, the fastest within a point of the best is taken.
    - `schemes`: the low-rank designs to compare, in place of those that suit the network.
    - `recipe` and other settings are those of `fit`.
    """
    wish, target = Wish(at_most, at_least), Target.parse(for_, device)
    if minutes is not None:
        check_number("minutes", minutes, above=0)
    if batch is not None:
        check_number("batch", batch, least=1, whole=True)
    for text in schemes:
        find_design(text)  # refused before images are read
    sample = build(model, None, pretrained=pretrained)
    asked = recipe if recipe is not None else "finetune" if pretrained else "modern"
    plan = recipe_for(data, asked, settings)
    images = open_for(sample, data, plan)
    check_classes(images)
    if recipe is None and not pretrained:
        plan = recipe_for(data, asked, settings, images=trained_on(images, plan), network=sample)
    size = image_size(images.test, augmentation(plan))
    builder = Builder(partial(build, model, len(images.classes), size[0], pretrained), size)
    check_network(builder(DENSE), images, plan)
    place, name = resolve_device(device), model if isinstance(model, str) else name_of(sample)
    network = {"name": name, "base": 1.0, "pretrained": pretrained}
    about = about_runs(plan, images, place, family=name, network=network, target=str(target))
    folder = Path(out)
    with locked(folder), progress("compare"), tempfile.TemporaryDirectory() as scratch:
        found = open_frontier(folder, about, len(images.test))
        batch = found.batch(batch, target.batch)
        fixed = recipe is not None or "batch_size" in settings
        timing: dict[str, Any] = {"batch": batch, "repeats": 9, "compile": target.gpu, "scratch": Path(scratch)}
        wishes: dict[str, Any] = {"wish": wish, "minutes": minutes, "schemes": schemes, "tell": say}
        how: dict[str, Any] = {"device": place, "pretrained": bool(pretrained), "fixed": fixed}
        comparing = Comparing(found, builder, target, step, data=images, recipe=plan, **timing, **wishes, **how)
        with warnings.catch_warnings(action="ignore", category=LowRankWarning):  # about speed, which is measured
            return _answer(comparing, comparing.run())


def build(model: Model, classes: int | None, channels: int = 3, pretrained: bool | str = False) -> nn.Module:
    """The dense network, for a number of classes where that can be chosen; with fresh weights or trained ones."""
    weights = DEFAULT if pretrained is True else pretrained or None
    if isinstance(model, nn.Module):
        return copy_with(model) if pretrained else fresh(model)
    if not isinstance(model, str):
        return model()
    if is_foreign(model):
        network, size = build_foreign(model, weights, classes)
        note(network, input_size=size)
        return network
    if weights:
        network = create_model(model, pretrained=weights)
        return network if classes is None else with_classes(network, classes)
    return create_model(model, norm="batch", num_classes=classes, in_channels=channels)


# The answer: the networks timed once more with their trained weights, a sentence and a table.


def _answer(comparing: Comparing, names: Sequence[str]) -> Comparison:
    from lowrank_cnn.report import write_report  # report builds on choose
    from lowrank_cnn.report.trade import draw_frontier

    rows = [comparing.rows[name] for name in names if not comparing.rows[name].failed]
    runs = min((len(row.runs) for row in rows), default=0)
    if not runs:
        raise LowRankError(f"no network was trained in the time: give more {option('minutes')}.")
    step("the trained networks are timed")
    _time_trained(comparing, rows)
    contenders = [
        Contender(
            in_words(row),
            kind_of(row),
            comparing.ms(row),
            sum(run.held_out or 0.0 for run in row.runs[:runs]) / runs,
            comparing.found.right_answers(row)[:runs],
        )
        for row in rows
    ]
    per_run = sum(run.wall for row in rows for run in row.runs[:runs]) / runs / 60
    spent = comparing.elapsed / 60
    epochs, usual = comparing.plan["epochs"], comparing.recipe.epochs
    length = f"{epochs} of {counted(usual, 'epoch')}" if epochs < usual else ""
    choice = choose(
        contenders, comparing.wish, minutes=lambda more: spent + (more - runs) * per_run, length=length
    )
    taken = next(row for row in rows if in_words(row) == choice.taken.name)
    folder, picture, page = comparing.found.folder, None, None
    winner = below(folder, folder / "winner")
    if winner.exists():
        shutil.rmtree(winner)
    shutil.copytree(comparing.folder(taken, taken.runs[0].seed), winner)
    comparing.keep(sentence=choice.sentence)
    with suppress(MissingExtra):
        picture = draw_frontier(comparing.found, folder / "compare.svg")
    with suppress(MissingExtra):
        page = write_report([folder / "runs"], folder / "report.html", answer=choice.sentence)
    return Comparison(
        folder,
        choice,
        _table(comparing, contenders),
        _remarks(comparing, choice, contenders, names),
        winner,
        picture,
        page,
    )


def _time_trained(comparing: Comparing, rows: Sequence[DesignRow]) -> None:
    """All finalists once more, in turns, with their trained weights and, in an engine, their very files."""
    made, target = {}, comparing.target
    for row in rows:
        seed = row.runs[0].seed
        if target.engine:
            made[row.name] = comparing.folder(row, seed) / f"net{target.suffix}"
        else:
            made[row.name] = comparing.prepared(comparing.trained(row, seed).network, row.name)
    times = target.times(made, comparing.images, repeats=21)
    dense = times[DENSE.name].ms if DENSE.name in times else next(iter(times.values())).ms
    for row in rows:
        sample, choice = times[row.name], target.choice_of(made[row.name])
        row.timing = DesignTime(sample.ms, sample.low, sample.high, dense, comparing.batch, *choice)
        _write_timings(comparing, row)
    comparing.keep()


def _write_timings(comparing: Comparing, row: DesignRow) -> None:
    """A record of the time beside that of each run, for the page."""
    assert row.timing is not None
    target, total = comparing.target, {"ms": row.timing.ms, "low": row.timing.low, "high": row.timing.high}
    values = {"kind": "timing", "input": list(comparing.images.shape), "total": total}
    values |= {"macs": row.macs * len(comparing.images)}
    values |= {"device": target.device, "runtime": target.engine or "optimize", "environment": environment()}
    for run in row.runs:
        folder = comparing.folder(row, run.seed)
        write_json(folder / "timing.json", {"model": load_record(folder).model, **values})


def _table(comparing: Comparing, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """All networks, the slowest first; those that were only tried have no test accuracy."""
    dense, by_name = comparing.rows[DENSE.name], {one.name: one for one in contenders}
    table = []
    for row in comparing.rows.values():
        one = by_name.get(in_words(row))
        tried = max((max(each.accuracies, default=0.0) for each in row.tries), default=None)
        table.append(
            {
                "network": in_words(row),
                "kind": kind_of(row),
                "macs": row.macs / dense.macs,
                "params": row.params / dense.params,
                "ms": comparing.ms(row),
                "accuracy": one.accuracy if one else None,
                "held_out": one.held_out if one else tried,
                "runs": one.runs if one else 0,
                "rate": row.rate,
            }
        )
    return sorted(table, key=lambda row: -row["ms"])


def _remarks(
    comparing: Comparing, choice: Choice, contenders: Sequence[Contender], names: Sequence[str]
) -> tuple[str, ...]:
    """The limits of the answer, and what a longer budget would decide."""
    told = [choice.more] if choice.more else []
    if max(one.accuracy for one in contenders) <= _by_guessing(comparing.data):
        told.insert(0, f"No network does better than guessing: give more {option('minutes')} or another recipe.")
    epochs, usual = comparing.plan["epochs"], comparing.recipe.epochs
    if epochs < usual:
        more = math.ceil(comparing.elapsed / 60 * usual / epochs)
        told.append(f"{option('minutes', more)} would allow for {usual} epochs.")
    failed = [in_words(row) for row in map(comparing.rows.__getitem__, names) if row.failed]
    if failed:
        told.append(f"Left out, since a loss was not finite: {', '.join(failed)}.")
    unsteady = [row for row in comparing.rows.values() if row.timing and row.timing.high > 1.5 * row.timing.low]
    if unsteady:
        told.append("Times are unsteady: another process ran meanwhile, so compare again on an idle machine.")
    return tuple(told)


def _by_guessing(data: Data) -> float:
    """The accuracy of naming one class for every test image, with three standard errors."""
    test = data.test
    labels = listed_labels(test.dataset) if isinstance(test, DatasetSplit) else test.labels
    share = 1 / len(data.classes) if labels is None else labels.bincount().max().item() / len(labels)
    return share + 3 * math.sqrt(share * (1 - share) / len(test))
