"""`trace_frontier`: time, tune and train every design of a family, and write one record that can be gone on with.

The order is such that a cut leaves a fair picture: all designs are timed, then controls of equal cost are added,
then every design is tuned by the same tries, then all are trained with the first seed, then with the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lowrank_cnn.data import Data
from lowrank_cnn.frontier.designs import (
    DENSE,
    Builder,
    Design,
    at_width,
    base_name,
    find_design,
    find_family,
    width_of_macs,
)
from lowrank_cnn.frontier.plan import FrontierPlan
from lowrank_cnn.frontier.record import DesignRow, Frontier, RateTry, SeedRun, open_frontier
from lowrank_cnn.frontier.timing import DesignClock, width_of_time
from lowrank_cnn.frontier.training import DesignTrainer
from lowrank_cnn.system.lock import locked
from lowrank_cnn.system.text import duration
from lowrank_cnn.train import get_recipe
from lowrank_cnn.train.fabric import resolve_device, resolve_precision
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.recipe import Recipe

HELD_OUT = 0.1
"""The share of training images that settings are tried on."""
TUNING_SEED, TEACHER_SEED = 1000, 2000
"""Seeds of tries begin at the first, apart from those of runs."""

Say = Callable[[str], None]


def trace_frontier(
    family: str,
    data: Data,
    out: str | Path,
    plan: FrontierPlan | None = None,
    *,
    recipe: str | None = None,
    settings: Mapping[str, object] | None = None,
    device: str = "auto",
    say: Say = print,
) -> Frontier:
    """Do what a plan asks for and is not done yet, and give the record of everything in `out`.

    >>> trace_frontier("airbench", data, "runs/f", FrontierPlan(("lr",), (0.5, 1.0), seeds=8))  # doctest: +SKIP
    """
    kind, plan = find_family(family), plan or FrontierPlan()
    resolved = get_recipe(recipe or kind.recipe, **(settings or {}))
    place = resolve_device(device)
    size = input_size(data.test, augmentation(resolved))
    builder = Builder(kind, size, len(data.classes), resolved.norm, plan.base)
    about = {
        "family": family,
        "network": {"name": kind.network, "base": plan.base},
        "recipe": resolved.to_dict(),
        "data": {"name": data.name, "train": len(data.train), "test": len(data.test), "digest": data.digest},
        "precision": resolve_precision(resolved.precision, place),
        "device": torch.device(place).type,
        "teacher": plan.teacher or None,
    }
    with locked(Path(out)):
        found = open_frontier(Path(out), about, len(data.test))
        Tracer(found, builder, data, resolved, place, plan, say).run()
    return found


class BudgetSpent(Exception):
    """The time that was given is over; what is done is saved."""


@dataclass
class Tracer:
    """Carries a plan out, one step at a time, saving after each."""

    found: Frontier
    builder: Builder
    data: Data
    recipe: Recipe
    device: str
    plan: FrontierPlan
    say: Say
    began: float = field(default_factory=time.monotonic)
    designs: list[Design] = field(default_factory=list)
    _clock: DesignClock | None = None

    def run(self) -> None:
        candidates = [find_design(text) for text in self.plan.designs]
        try:
            self.add(DENSE)
            for width in self.plan.widths:
                self.add(at_width(DENSE, width))
            for design in candidates:
                self.add(design)
                self._widen(design)
            for row in [row for row in self._rows() if not row.dense]:
                self._match(row)
            self._tune()
            self._train()
        except BudgetSpent:
            self.say(f"The time is over ({self.plan.budget:.0f} s): the same command goes on from here.")

    def add(self, design: Design) -> DesignRow:
        """A design in the record, counted and timed; one that is there already stays as it is."""
        row = self.found.row(design.name)
        if row is None:
            cost = self.builder.count(design)
            row = DesignRow(design.to_dict(), cost.macs, cost.params)
            self.found.rows.append(row)
            self.found.save()
        if design.name not in (known.name for known in self.designs):
            self.designs.append(design)
        if self.plan.batch and row.timing is None:
            self._check_budget()
            row.timing = self.clock.time(design)
            self.found.save()
            self.say(f"{design.name}: {row.timing.ms:.3f} ms, {row.macs / 1e6:.1f} M MACs ({row.timing.choice})")
        return row

    @property
    def clock(self) -> DesignClock:
        """Made when first needed: it holds the dense network in its fastest form."""
        if self._clock is None:
            self._clock = DesignClock(
                self.builder, torch.device(self.device), self.plan.batch, self.plan.compile, self.plan.repeats
            )
        return self._clock

    def _rows(self) -> list[DesignRow]:
        """The rows of what was asked for: a folder may hold more."""
        return [row for design in self.designs if (row := self.found.row(design.name))]

    def _widen(self, design: Design) -> None:
        """The design as wide as the dense network allows, by MACs and by time."""
        dense, own = self.found.row(DENSE.name), self.found.row(design.name)
        assert dense is not None
        assert own is not None
        if "macs" in self.plan.widen:
            self.add(at_width(design, width_of_macs(self.builder, design, dense.macs), "macs of dense"))
        if "time" in self.plan.widen and dense.timing and own.timing:
            width = width_of_time(self._times(design), dense.timing.ratio)
            self.add(at_width(design, width, "time of dense"))

    def _match(self, row: DesignRow) -> None:
        """The thin dense networks that a low-rank one has to beat: of its MACs, and of its time.

        Where it costs as much as the dense network, that one is its rival.
        """
        dense = self.found.row(DENSE.name)
        assert dense is not None
        if "macs" in self.plan.match and row.macs < dense.macs:
            self._add_control(width_of_macs(self.builder, DENSE, row.macs), f"macs of {row.name}")
        if "time" in self.plan.match and row.timing and row.timing.ratio < 1:
            width = width_of_time(self._times(DENSE), row.timing.ratio)
            self._add_control(width, f"time of {row.name}")

    def _add_control(self, width: float, matched: str) -> None:
        """A thin dense network, unless one of the same filters is there under another width."""
        design = at_width(DENSE, min(width, 1.0), matched)
        cost = self.builder.count(design)
        if not any(row.dense and (row.macs, row.params) == (cost.macs, cost.params) for row in self._rows()):
            self.add(design)

    def _times(self, design: Design) -> dict[float, float]:
        """The measured times of a design by its width."""
        rows = [row for row in self._rows() if base_name(row.name) == base_name(design.name)]
        return {row.design["width"]: row.timing.ratio for row in rows if row.timing}

    def _tune(self) -> None:
        """Every design by the same factors of the learning rate, on images held out of training."""
        if not self.plan.rates or all(row.runs for row in self._rows()):
            return
        data = self.data.holdout(round(HELD_OUT * len(self.data.train)), 0)
        trainer = self._trainer(data)
        for design in self.designs:
            row = self.found.row(design.name)
            assert row is not None
            if row.runs:  # they belong together: later seeds are trained at the rate of the first
                continue
            for rate in self.plan.rates:
                self._try(trainer, design, row, rate)
            best = max(row.tries, key=lambda one: sum(one.accuracies) / len(one.accuracies))
            row.rate = best.rate
            self.found.save()

    def _try(self, trainer: DesignTrainer, design: Design, row: DesignRow, rate: float) -> None:
        known = next((one for one in row.tries if one.rate == rate), None) or RateTry(rate)
        for place in range(len(known.accuracies), self.plan.tries):
            self._check_budget()
            try:
                outcome = trainer.train(design, TUNING_SEED + place, rate=rate)
                accuracy = float(outcome.right.double().mean())
            except NotFiniteError:
                accuracy = 0.0
            known.accuracies.append(accuracy)
            row.tries = [one for one in row.tries if one.rate != rate] + [known]
            self.found.save()
            self.say(f"{design.name}, {rate:g} times the rate: {100 * accuracy:.2f}% of the images held out")

    def _train(self) -> None:
        if not (left := self._left()):
            return
        trainer = self._trainer(self.data)
        walls: list[float] = []
        for number, (seed, design) in enumerate(left):
            self._check_budget()
            line = self._train_one(trainer, design, seed, walls)
            rest = sum(walls) / len(walls) * (len(left) - number - 1)
            self.say(f"{number + 1}/{len(left)}  {line}; {duration(rest)} left")

    def _left(self) -> list[tuple[int, Design]]:
        """Runs that are not done, the first seed of all designs first."""
        pairs = [(seed, design) for seed in range(1, self.plan.seeds + 1) for design in self.designs]
        return [(seed, design) for seed, design in pairs if not self._done(design, seed)]

    def _done(self, design: Design, seed: int) -> bool:
        row = self.found.row(design.name)
        return row is not None and (row.run_of(seed) is not None or seed in row.failed)

    def _trainer(self, data: Data) -> DesignTrainer:
        """What trains designs on these images; a teacher learns from these alone."""
        trainer = DesignTrainer(self.builder, data, self.recipe, self.device)
        if not self.plan.teacher:
            return trainer
        self._check_budget()
        taught = trainer.train(find_design(self.plan.teacher), TEACHER_SEED)
        share = 100 * float(taught.right.double().mean())
        self.say(f"The teacher, {self.plan.teacher}: {share:.2f}% in {taught.wall:.1f} s")
        return replace(trainer, teacher=taught.network)

    def _train_one(self, trainer: DesignTrainer, design: Design, seed: int, walls: list[float]) -> str:
        row = self.found.row(design.name)
        assert row is not None
        began = time.monotonic()
        try:
            outcome = trainer.train(design, seed, rate=row.rate)
        except NotFiniteError:
            row.failed.append(seed)
            self.found.save()
            walls.append(time.monotonic() - began)
            return f"{design.name} seed {seed}: the loss was not finite"
        walls.append(outcome.wall)
        result, history = outcome.record.result, outcome.record.history
        environment = self.found.here()
        place, checksum = self.found.add_answers(outcome.right)
        speed = result["images_per_second"]
        run = SeedRun(
            seed=seed,
            correct=int(outcome.right.sum()),
            row=place,
            sha256=checksum,
            seconds=self._steady_seconds(speed),
            wall=outcome.wall,
            images_per_second=speed,
            train_accuracy=history[-1]["train_accuracy"] if history else 0.0,
            environment=environment,
        )
        row.runs.append(run)
        self.found.save()
        share = f"{100 * run.correct / self.found.images:.2f}%"
        return f"{design.name} seed {seed}: {share} in {run.seconds:.1f} s, {run.wall:.1f} s with compiling"

    def _steady_seconds(self, speed: float) -> float:
        """Seconds of all epochs at the median speed: the first epoch also compiles."""
        images = len(self.data.train) // self.recipe.batch_size * self.recipe.batch_size
        return self.recipe.epochs * images / speed if speed else 0.0

    def _check_budget(self) -> None:
        if time.monotonic() - self.began > self.plan.budget:
            raise BudgetSpent
