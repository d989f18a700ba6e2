"""Time, tune and train every design of a family, and write one resumable record.

All designs are timed first, and controls of equal cost are added. All networks are then timed again in turns, in
processes of their own. Every design is tuned by the same tries. All are trained with the first seed before the
second begins: a run that is cut short has treated all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.choose.candidates import (
    CONTROLS,
    DENSE,
    STEP,
    Builder,
    Design,
    at_width,
    base_name,
    find_design,
    find_family,
    width_of_macs,
)
from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier, about_runs, open_frontier
from lowrank_cnn.choose.runs import DesignRun, RunMaker, RunOutcome, WorkerPool, release_memory
from lowrank_cnn.choose.target import Target, TimedDesigns
from lowrank_cnn.core.clock import check_budget
from lowrank_cnn.core.errors import LowRankError, check_choice, check_number
from lowrank_cnn.core.files import locked
from lowrank_cnn.core.processes import apart
from lowrank_cnn.core.text import counted, duration
from lowrank_cnn.data import Data
from lowrank_cnn.train import get_recipe
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.inputs import augmentation, image_size

TUNING_SEED = 1000
"""Seeds of tries begin here, apart from those of runs."""
PROCESSES = 3
"""Fresh processes in which networks are timed: times of one network differ more between processes than within."""
FURTHEST = 4
"""How far beyond those of the plan rates are tried: the largest twice doubled, the least twice halved."""
MATCHES = ("macs", "time")


@dataclass(frozen=True)
class FrontierPlan:
    """What `trace_frontier` is asked for.

    - `designs`: low-rank candidates by name or scheme; `widths`: those of the dense network, 1 always among them.
    - `match`: also dense networks that cost each candidate's MACs, and time.
    - `rates`: factors of the learning rate to try every design with, `tries` seeds each, on held-out images. While
      the best of several is the largest or the least for any design, all try twice that, or half.
    - `batch`: images in a batch to time inference with; 0 times nothing. `repeats`: runs that a median is of.
    - `base`: the width of the family's own network that counts as 1: below 1 for a miniature.
    - `teacher`: a design, `dense@1.5` say, that is trained first and that all others then learn from as well.
    - `processes`: trainings at a time on the device; their seconds are recorded only if it is one.
    - `budget`: seconds after which nothing new is begun.
    """

    designs: tuple[str, ...] = ()
    widths: tuple[float, ...] = ()
    match: tuple[str, ...] = MATCHES
    seeds: int = 8
    rates: tuple[float, ...] = ()
    tries: int = 1
    batch: int = 256
    compile: bool = True
    repeats: int = 21
    base: float = 1.0
    teacher: str = ""
    processes: int = 1
    budget: float = float("inf")

    def __post_init__(self) -> None:
        for name in self.match:
            check_choice("match", name, MATCHES)
        for name, least in {"seeds": 0, "batch": 0, "tries": 1, "processes": 1}.items():
            check_number(name, getattr(self, name), least=least, whole=True)
        for rate in self.rates:
            check_number("a factor of the learning rate", rate, above=0, below=1000)
        check_budget(self.budget)
        if self.teacher:
            find_design(self.teacher)
        if not self.batch:  # nothing is timed
            object.__setattr__(self, "match", tuple(by for by in self.match if by != "time"))


def width_of_time(measured: dict[float, float], target: float) -> float:
    """The width at which a design would take `target`, between and beyond the widths that were measured.

    Time is taken for a power of the width between two neighbours; the result is a multiple of `STEP`.
    """
    points = sorted((log(width), log(ms)) for width, ms in measured.items())
    if len(points) == 1:
        points.append((points[0][0] + 1, points[0][1] + 2))  # time grows with the square of the width
    pairs = list(pairwise(points))
    low, high = next((pair for pair in pairs if pair[1][1] >= log(target)), pairs[-1])
    slope = max((high[1] - low[1]) / (high[0] - low[0]), 0.1)  # a flat stretch would lead anywhere
    width = exp(low[0] + (log(target) - low[1]) / slope)
    return min(4.0, max(STEP, round(width / STEP) * STEP))


def trace_frontier(
    family: str,
    data: Data,
    out: str | Path,
    plan: FrontierPlan,
    *,
    recipe: str | None = None,
    settings: Mapping[str, object] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> Frontier:
    """Carry out the rest of a plan, and return the record of everything in `out`.

    >>> trace_frontier("airbench", data, "runs/f", FrontierPlan(("lr",), (0.5, 1.0), seeds=8))  # doctest: +SKIP
    """
    kind, place = find_family(family), resolve_device(device)
    resolved = get_recipe(recipe or kind.recipe, **(settings or {}))
    size = image_size(data.test, augmentation(resolved))
    builder = Builder.of_family(kind, size, len(data.classes), resolved.norm, plan.base)
    network = {"name": kind.network, "base": plan.base}
    about = about_runs(resolved, data, place, teacher=plan.teacher or None, family=family, network=network)
    with locked(Path(out)):
        found = open_frontier(Path(out), about, len(data.test))
        maker = RunMaker(builder, data, resolved, place, plan.teacher, Path(out))
        how: dict[str, Any] = {name: getattr(plan, name) for name in ("batch", "repeats", "compile")}
        with WorkerPool(maker, plan.processes) as pool:
            how |= {"scratch": Path(), "maker": maker, "pool": pool, "plan": plan}
            Tracer(found, builder, Target(place), say, **how).run()
    return found


class BudgetSpent(Exception):
    """The budget of time is spent. Finished runs are saved."""


@dataclass
class Tracer(TimedDesigns):
    """Carries a plan out, and saves after each step."""

    maker: RunMaker
    pool: WorkerPool[DesignRun, RunOutcome]
    plan: FrontierPlan
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        candidates = [find_design(text) for text in self.plan.designs]
        self.found.batch(self.plan.batch)  # another than that of the record is refused
        try:
            for design in (DENSE, *(at_width(DENSE, width) for width in self.plan.widths), *candidates):
                self.add(design)
            for row in [row for row in self.rows.values() if not row.dense]:
                self._match(row)
            self._time_apart()
            self._tune()
            runs = [
                DesignRun(row.design, seed, row.rate)
                for seed in range(1, self.plan.seeds + 1)
                for row in self.rows.values()
                if seed not in row.seeds
            ]
            self._run_all(runs, self._keep)
        except BudgetSpent:
            self.say(f"The time is over ({self.plan.budget:.0f} s): the same command continues from here.")

    def time(self, design: Design) -> DesignTime:
        self._check_budget()
        return super().time(design)

    def _match(self, row: DesignRow) -> None:
        """The thin dense networks that a low-rank one has to beat: of its MACs, and of its time.

        On a GPU those of its time are in 64s of filters, which run faster there. If it costs as much as the dense
        network, that one is its rival.
        """
        branches = "-branches" * row.branched
        if "macs" in self.plan.match and row.macs < self.rows[DENSE.name].macs:
            thin = CONTROLS[f"dense{branches}"]
            self._add_control(thin, width_of_macs(self.builder, thin, row.macs), f"macs of {row.name}")
        if "time" in self.plan.match and row.timing and row.timing.first_ratio < 1:
            thin = CONTROLS[f"dense{'-64s' * (self.found.about['device'] == 'cuda')}{branches}"]
            alike = [one for one in self.rows.values() if base_name(one.name) == thin.name]
            # The first times, by which a resumed trace matches again.
            times = {one.design.width: one.timing.first_ratio for one in alike if one.timing}
            width = width_of_time({1.0: 1.0, **times}, row.timing.first_ratio)
            self._add_control(thin, width, f"time of {row.name}")

    def _add_control(self, thin: Design, width: float, matched: str) -> None:
        """A thin dense network: that of the record, if it has one of the same filters under another width."""
        design = at_width(thin, min(width, 1.0), matched)
        cost = self.builder.count(design)
        same = [row for row in self.found.rows if (row.macs, row.params) == (cost.macs, cost.params)]
        known = [row for row in same if row.dense and row.branched is design.branched]
        self.add(known[0].design if known else design)

    def _time_apart(self) -> None:
        """Time all networks of the record in turns, in fresh processes, until each has been in enough of them."""
        classes, norm = len(self.maker.data.classes), self.maker.recipe.norm
        family = self.found.about["family"], self.builder.size, classes, norm, self.plan.base
        how = {"compile": self.compile, "repeats": self.repeats}
        while self.batch and min(len(row.timing.processes) for row in self.found.rows if row.timing) < PROCESSES:
            self._check_budget()
            self.reference = None
            release_memory()  # the process needs it
            time_in_turns(self.found, family, self.target.device, self.batch, how, self.say)
            self.found.save()

    def _tune(self) -> None:
        """Every design by the same factors of the learning rate, on images held out of training.

        Factors that are new in the plan are tried by designs that have runs as well, if they were tuned; those for
        which one is better are trained again.
        """
        known = {one.rate for row in self.found.rows for one in row.tries}
        final = any(row.runs for row in self.found.rows)  # no factor is added by itself any more
        rows = {name: row for name, row in self.rows.items() if self.plan.rates and (known or not row.runs)}
        rates = {*self.plan.rates, *known}
        while rows:
            jobs = [
                DesignRun(row.design, TUNING_SEED + place, rate, held_out=True)
                for row in rows.values()
                for rate in sorted(rates)
                for place in range(len(row.tried(rate).accuracies), self.plan.tries)
            ]
            self._run_all(jobs, self._keep_try)
            for row in rows.values():
                before, _ = row.rate, row.choose_rate()
                if row.rate != before and row.runs:
                    self.say(f"{row.name}: {row.rate:g} times the rate is better, so it is trained again")
                    row.runs, row.failed = [], []  # their answers in the file count no longer
            self.found.save()
            best, least, most = {row.rate for row in rows.values()}, min(rates), max(rates)
            more = {2 * most} if most in best and most < FURTHEST * max(self.plan.rates) else set()
            more |= {least / 2} if least in best and least > min(self.plan.rates) / FURTHEST else set()
            if final or len(rates) == 1 or not more:
                return
            rates |= more

    def _run_all(self, jobs: list[DesignRun], keep: Callable[[DesignRun, RunOutcome], str]) -> None:
        """Make runs as long as the time lasts, keep each, and tell how it went; a teacher is trained before."""
        if jobs and self.plan.teacher:
            self._check_budget()
            taught = self.maker.teach(held_out=jobs[0].held_out)
            self.say(f"The teacher, {self.plan.teacher}: {100 * taught.result['top1']:.2f}%")
        walls: list[float] = []
        for job, outcome in self.pool.results(jobs, may_begin=lambda _: not self._spent):
            if isinstance(outcome, LowRankError):
                raise outcome
            walls.append(outcome.wall)
            rest = sum(walls) / len(walls) * (len(jobs) - len(walls)) / self.plan.processes
            self.say(f"{len(walls)}/{len(jobs)}  {keep(job, outcome)}; {duration(rest)} left")
        if len(walls) < len(jobs):
            raise BudgetSpent

    def _keep_try(self, job: DesignRun, outcome: RunOutcome) -> str:
        """Write a try into the record; a sentence about it."""
        self.rows[job.design.name].tried(job.rate).accuracies.append(outcome.accuracy)
        self.found.here()  # a record of tries alone names its machine too
        self.found.save()
        share = f"{100 * outcome.accuracy:.2f}%"
        return f"{job.design.name}, {job.rate:g} times the rate: {share} of the images held out"

    def _keep(self, job: DesignRun, outcome: RunOutcome) -> str:
        """Write a run into the record; a sentence about it."""
        row, told = self.rows[job.design.name], f"{job.design.name} seed {job.seed}"
        if outcome.right is None:
            row.failed.append(job.seed)
            self.found.save()
            return f"{told}: the loss was not finite"
        speed, seconds = outcome.images_per_second, 0.0
        if speed:  # all epochs at their median speed: the first one also compiles
            recipe, images = self.maker.recipe, len(self.maker.data.train)
            seconds = recipe.epochs * (images // recipe.batch_size * recipe.batch_size) / speed
        alone = self.plan.processes == 1
        run = self.found.add_run(
            row,
            job.seed,
            outcome.right,
            seconds=seconds if alone else None,
            wall=outcome.wall,
            images_per_second=speed if alone else None,
            train_accuracy=outcome.train_accuracy,
            processes=self.plan.processes,
        )
        share = f"{100 * run.correct / self.found.images:.2f}%"
        if run.seconds is None:
            return f"{told}: {share} in {run.wall:.1f} s beside others"
        return f"{told}: {share} in {run.seconds:.1f} s, {run.wall:.1f} s with compiling"

    @property
    def _spent(self) -> bool:
        return time.monotonic() - self.began > self.plan.budget

    def _check_budget(self) -> None:
        if self._spent:
            raise BudgetSpent


def time_in_turns(
    found: Frontier,
    family: Sequence[Any],
    device: str,
    batch: int,
    how: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Time all networks of a record in turns, in a process of their own, and add what each took.

    `family` are the name of the family and the arguments of `Builder.of_family`, `how` are settings of `optimize`.
    """
    rows = [(row, row.timing) for row in found.rows if row.timing]
    say(f"{counted(len(rows), 'network')} in turns, in a process of their own")
    known = [(asdict(row.design), asdict(timing)) for row, timing in rows]
    try:
        ms = apart(__file__, "time_designs", family, device, torch.get_num_threads(), batch, how, known)
    except LowRankError as error:
        raise LowRankError(f"the networks cannot be timed in a process of their own: {error}") from error
    for row, timing in rows:
        timing.processes.append([ms[row.name], ms[DENSE.name]])


def time_designs(
    family: Sequence[Any], device: str, threads: int, batch: int, how: dict[str, Any], designs: Sequence[Any]
) -> dict[str, float]:
    """Milliseconds of designs in torch, all in turns, each in the form that it had before. `apart` calls it."""
    torch.set_num_threads(threads)
    name, size, *more = family
    builder, target, made = Builder.of_family(find_family(name), tuple(size), *more), Target(device), {}
    images = target.images(batch, builder.size)
    for design, known in designs:
        torch.manual_seed(0)
        network = builder(Design(**design))
        made[design["name"]] = target.prepared(network, images, Path(), known=DesignTime(**known), **how)
    times = target.times(made, images, repeats=how["repeats"], budget=10.0 * len(made))
    return {name: sample.ms for name, sample in times.items()}
