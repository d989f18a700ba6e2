"""A comparison in progress: its plan, its candidates, timed where they will run, and their runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from lowrank_cnn.choose.candidates import DENSE, Design, at_width, find_design, width_of_macs
from lowrank_cnn.choose.choice import MOST_RUNS, SAME_TIME, Wish
from lowrank_cnn.choose.frontier import DENSE_NAME, LOW_RANK, THIN, DesignRow, in_words, kind_of, pack
from lowrank_cnn.choose.runs import train
from lowrank_cnn.choose.target import TimedDesigns
from lowrank_cnn.choose.trace import width_of_time
from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.files import below
from lowrank_cnn.core.progress import step
from lowrank_cnn.core.text import counted, duration
from lowrank_cnn.data import Data
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.prune import prune
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recipes import LEAST_BATCH
from lowrank_cnn.train.run_folder import Record
from lowrank_cnn.train.trained import Trained, load_checkpoint

RATES = (0.5, 1.0, 2.0)
"""Factors of the recipe's learning rate that every network is tried with."""
SHORT = 1 / 4
"""The share of the epochs of a run that a try has."""
FINALISTS, FEWEST_RUNS = 4, 3
STEPS = 400
"""The fewest steps of a run, if smaller batches can give them."""
MOST_MINUTES = 60
PLANNED = 0.9
"""The share of the budget that is planned for training; timing and what was not foreseen have the rest."""
NEAR, UNEVEN = 0.1, 1.5
"""How near the MACs of a thin network in 16s or 32s of filters come to those wanted, as a share, and by which
factor a layer may have more or fewer filters than in 8s."""
MOST_WIDTHS = 4
"""The widths at which a thin network is timed to find that of a low-rank one's time."""
NARROWEST = 1 / 16
"""The share of a low-rank network's MACs down to which a thin one of its time is sought."""
NEAR_LATE = 0.8
"""The share of that time which is near enough once timing has had its share of the budget."""
TIMING = 0.015
"""The share of the budget in which the fastest form of one network is searched."""
MOST_TIMING = 1 / 3
"""The share of the budget after which only networks are timed that a comparison cannot do without."""
LADDERS: tuple[tuple[str, ...], ...] = (
    ("bands", "lr"),  # of depthwise networks
    ("lr", "mixture"),
)
"""Low-rank designs, the first that fits the network; with a short budget only its first one is compared."""
TRAINED = ("lr-join", "separable")
"""Those that trained filters are decomposed into."""
LEVELS = ((2, RATES, 1.0), (1, RATES, 1 / 3), (1, (1.0,), 0.0))
"""Low-rank designs, learning rates, and the share of the recipe's epochs that a budget has to allow for them."""


def _short(epochs: int) -> int:
    """The epochs of a try, where runs have so many."""
    return max(2, round(SHORT * epochs))


@dataclass
class Comparing(TimedDesigns):
    """A comparison in progress. Finished steps are in the record, and are skipped when it is started again.

    `tell` gets the lines that stay. Unless batches are of a `fixed` size, that of the recipe, they are smaller if
    the budget allows for few epochs.
    """

    data: Data
    recipe: Recipe
    device: str
    wish: Wish
    minutes: float | None
    tell: Callable[[str], None]
    schemes: Sequence[str]
    pretrained: bool
    fixed: bool
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of an epoch of each network, as last measured."""
    run_seconds: list[float] = field(default_factory=list)
    """Seconds of everything else in each run: much the same for all networks."""

    def run(self) -> list[str]:
        """Train the finalists; their names."""
        self.spent = self.plan.get("spent", 0.0)
        for row in self.found.rows:
            for run in row.runs:
                self._learn_speed(row.name, run.wall, self.plan["epochs"], run.images_per_second)
        if "level" not in self.plan:
            self._make_plan()
        self._find_candidates()
        self._try_all()
        names = self._finalists()
        self._train(names)
        return names

    # The plan: it is made once, and kept in the record.

    @property
    def plan(self) -> dict[str, Any]:
        return self.found.about.setdefault("plan", {})

    def keep(self, **decided: Any) -> None:
        self.plan.update(decided, spent=self.elapsed)
        self.found.save()

    @property
    def elapsed(self) -> float:
        """Seconds that the comparison has taken, with those before it was started again."""
        return self.spent + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        minutes = self.minutes if self.minutes is not None else self.plan["minutes"]
        return 60 * minutes - self.elapsed

    @property
    def time_left(self) -> str:
        return f"{duration(max(0.0, self.left))} left"

    @property
    def _late(self) -> bool:
        """Whether timing has had its share of the budget: kernels may compile for longer than planned."""
        return self.left < (1 - MOST_TIMING) * 60 * self.plan["minutes"]

    def _make_plan(self) -> None:
        """How many networks and tries the budget allows for, by the speed of the dense network."""
        self._probe(DENSE.name)

        def seconds(level: int, rates: Sequence[float], epochs: int) -> float:
            return self._seconds_of_all(1 + 2 * level, rates, _short(epochs), epochs)

        def epochs_in(minutes: float, level: int, rates: Sequence[float]) -> int:
            """The epochs that fit into a budget, at most the recipe's; 0 if not even one does."""
            fits = (
                n for n in range(self.recipe.epochs, 0, -1) if seconds(level, rates, n) <= PLANNED * 60 * minutes
            )
            return next(fits, 0)

        chosen = self.minutes
        if chosen is None:
            all_epochs = seconds(*LEVELS[0][:2], self.recipe.epochs)
            chosen = min(MOST_MINUTES, max(1, math.ceil(all_epochs / PLANNED / 60)))
        level, rates = next(
            (level, rates)
            for level, rates, share in LEVELS
            if not (self.pretrained and len(rates) > 1)  # tries would need a fine-tuned network each
            and epochs_in(chosen, level, rates) >= share * self.recipe.epochs
        )
        epochs = max(1, epochs_in(chosen, level, rates))
        self.target = replace(self.target, seconds=min(30.0, max(2.0, TIMING * 60 * chosen)))
        batch, images = self.recipe.batch_size, len(self.data.train) - self._held
        while not self.fixed and batch >= 2 * LEAST_BATCH and epochs * images < STEPS * batch:
            batch //= 2
        self.keep(minutes=chosen, level=level, rates=list(rates), short=_short(epochs), batch=batch)
        about = f"{counted(len(self.data.train), 'training image')}, {counted(len(self.data.test), 'test image')}"
        tries = f"tries of {counted(len(rates), 'learning rate')}, then " if len(rates) > 1 else ""
        told = f"dense, thin and low-rank: {tries}{FEWEST_RUNS} runs of up to {counted(epochs, 'epoch')} each"
        told += f" in batches of {batch}" if batch < self.recipe.batch_size else ""
        least = math.ceil(self._training_seconds(3, 1) / 60)
        limit = f"At most {chosen:g} minutes ({option('minutes')})."
        if least > chosen:
            long = counted(least, "minute")
            limit = f"One epoch of three networks takes about {long}, more than {option('minutes', chosen)}."
        self.tell(f"{about}; {told}; for {self.target}. {limit}")

    def _probe(self, name: str) -> None:
        """Find the seconds of an epoch of a network, and of everything else in a run."""
        step(f"how fast {name} trains")
        few, design = self.data.holdout(self._held, 1), self.rows[name].design if name in self.rows else DENSE
        count = min(len(few.train), 4 * self.recipe.batch_size)
        part = replace(few, train=few.train.subset(torch.arange(count)))
        self._fit(design, part, epochs=1, rate=1.0, seed=0)  # the first run also imports and compiles
        began = time.monotonic()
        record = self._fit(design, part, epochs=2, rate=1.0, seed=0)
        wall, epochs = time.monotonic() - began, 2 * count / len(few.train)
        self._learn_speed(name, wall, epochs, record.result["images_per_second"])

    @property
    def _held(self) -> int:
        """How many training images decide: a fifth of a small set, at most five thousand."""
        return max(1, min(round(0.2 * len(self.data.train)), 5000))

    # The candidates, timed where they will run.

    def _find_candidates(self) -> None:
        if "candidates" in self.plan:
            for name in self.plan["candidates"]:
                row = self.found.row(name)
                assert row is not None
                self.add(row.design)
            return
        level = self.plan["level"]
        step("the dense network is timed")
        self.add(DENSE)
        ladders = (TRAINED[:level],) if self.pretrained else [ladder[:level] for ladder in LADDERS]
        reasons: list[str] = []
        for ladder in [self.schemes] if self.schemes else ladders:
            for text in ladder:
                step(f"{text} is timed")
                with self._explaining(reasons):
                    self._add_in_time(find_design(text))
                if (len(self.rows) == 1 or self._late) and not self.schemes:
                    break  # the ladder is for other networks, or there is time for one design alone
            if len(self.rows) > 1:
                break
        for row in [row for row in self.rows.values() if not row.dense]:
            if self._late and any(kind_of(one) == THIN for one in self.rows.values()):
                break
            step(f"thinner networks are timed beside {in_words(row)}")
            with self._explaining(reasons):
                self._add_thin(row)
        if not any(kind_of(row) == THIN for row in self.rows.values()):
            with self._explaining(reasons):
                self._add_in_time(at_width(*self._thin_of(self.rows[DENSE.name].macs / 2)))
        dense = self.rows[DENSE.name]
        for row in [row for row in self.rows.values() if row is not dense and row.macs >= dense.macs]:
            reasons.append(f"{in_words(row)} has as many MACs.")
            self._drop(row.design)
        if len(self.rows) == 1:
            raise LowRankError(f"there is no cheaper version of this network: {' '.join(dict.fromkeys(reasons))}")
        self.keep(candidates=list(self.rows))

    @contextmanager
    def _explaining(self, reasons: list[str]) -> Iterator[None]:
        try:
            yield
        except LowRankError as error:
            reasons.append(str(error))

    def _add_in_time(self, design: Design) -> None:
        """A design, thinner where the wish demands that."""
        timing = self.add(design)
        for _ in range(4):
            assert timing is not None
            if self.wish.at_most is None or timing.ms <= self.wish.at_most:
                return
            self._drop(design)
            width = width_of_time({design.width: timing.ms}, 0.98 * self.wish.at_most)
            design = at_width(design, min(width, design.width - 1 / 32))
            timing = self.add(design)

    def _drop(self, design: Design) -> None:
        """Forget a design that was only timed to find another."""
        self.found.rows.remove(self.rows.pop(design.name))

    def _thin_of(self, macs: float) -> tuple[Design, float]:
        """The dense network that is made thin, and its width of so many MACs.

        A GPU runs other numbers of filters no faster than the next 32. Narrow layers that cannot be divided so
        would lose their balance with the others: then filters come in 16s or 8s.
        """
        kinds = [replace(DENSE, multiple=multiple) for multiple in ((8, 16, 32) if self.target.gpu else (8,))]
        fair, *coarser = [(kind, min(1.0, width_of_macs(self.builder, kind, macs))) for kind in kinds]
        usual = self.builder.count(at_width(*fair))
        for found in reversed(coarser):
            count = self.builder.count(at_width(*found))
            filters = [
                (ours.output[0], theirs.output[0]) for ours, theirs in zip(count.layers, usual.layers, strict=True)
            ]
            alike = all(max(pair) <= UNEVEN * min(pair) for pair in filters)
            if alike and all(abs(count.macs / other - 1) <= NEAR for other in (macs, usual.macs)):
                return found
        return fair

    def _add_thin(self, row: DesignRow) -> None:
        """The widest thin network that is as fast as a low-rank one; that of its MACs where none is."""
        thin, width = self._thin_of(row.macs)
        least = min(width, width_of_macs(self.builder, thin, NARROWEST * row.macs))
        times, before, kept_in_time = {1.0: 1.0}, set(self.rows), False
        timed = {self.rows[DENSE.name].macs}  # widths that differ may give the same network
        kept: Design | None = None
        assert row.timing is not None
        wanted = row.timing.ratio
        while len(times) <= (2 if self._late else MOST_WIDTHS):
            design: Design | None = at_width(thin, width, f"time of {row.name}")
            if (macs := self.builder.count(design).macs) in timed:
                return
            timed.add(macs)
            timing = self.add(design)
            assert timing is not None
            times[width] = timing.ratio
            in_time, near = SAME_TIME * timing.ratio <= wanted, NEAR_LATE if self._late else SAME_TIME
            if kept is None or (in_time and (width > kept.width or not kept_in_time)):
                kept, design, kept_in_time = design, kept, in_time
            if design is not None and design.name not in before:
                self._drop(design)
            if timing.ratio >= near * wanted if in_time else width == least:
                return
            width = max(least, min(1.0, width_of_time(times, wanted)))

    # The runs.

    def _fit(
        self, design: Design, data: Data, *, epochs: int, rate: float, seed: int, told: str = "", **how: Any
    ) -> Record:
        def shown(figures: Any, _network: nn.Module) -> bool:
            step(f"{told}, epoch {figures.epoch} of {epochs}; {self.time_left}")
            return False

        batch = self.plan.get("batch", self.recipe.batch_size)
        lr = self.recipe.lr * (batch / self.recipe.batch_size) ** 0.5
        recipe = replace(self.recipe, epochs=epochs, lr=lr, batch_size=batch)
        torch.manual_seed(seed)
        network, teacher = self._network(design, seed)
        how |= {"seed": seed, "rate": rate, "device": self.device, "teacher": teacher}
        return train(network, data, recipe, callbacks=(shown,) if told else (), **how)

    def _network(self, design: Design, seed: int) -> tuple[nn.Module, Trained | None]:
        """The network to train. A cheaper one of a trained network has its weights, and learns from it."""
        if not self.pretrained or design == DENSE:
            return self.builder(design), None
        dense = load_checkpoint(self.folder(self.rows[DENSE.name], seed), network=self.builder(DENSE))
        network, size = dense.network, self.builder.size
        if design.width != 1:
            network = prune(network, width=design.width, multiple=design.multiple, input_size=size)
        if not design.dense:
            network = decompose(network, design.scheme, input_size=size)
        return network, dense

    def _try_all(self) -> None:
        """Every network with the same learning rates, briefly, on the same images held out."""
        if not any(row.tries for row in self.rows.values()):
            self._shorten_tries()
        rates, short = self.plan["rates"], self.plan["short"]
        few, jobs = self.data.holdout(self._held, 0), []
        for row in self.rows.values():
            jobs += [(row, rate) for rate in rates if len(rates) > 1 and not row.tried(rate).accuracies]
        for place, (row, rate) in enumerate(jobs):
            if self.left <= self._training_seconds(FINALISTS, 1):
                self._leave_out_tries()
                return
            told = f"try {place + 1} of {len(jobs)}: {in_words(row)} at {rate:g} times the rate"
            step(told)
            began = time.monotonic()
            try:
                record = self._fit(row.design, few, epochs=short, rate=rate, seed=0, told=told)
                accuracy, speed = record.result["top1"], record.result["images_per_second"]
            except NotFiniteError:
                accuracy, speed = 0.0, None
            self._learn_speed(row.name, time.monotonic() - began, short, speed)
            row.tried(rate).accuracies.append(accuracy)
            self.keep()
            self.tell(f"{told}: {100 * accuracy:.1f}% held out; {self.time_left}")
        for row in self.rows.values():
            row.choose_rate()
        self.keep()

    def _training_seconds(self, runs: int, epochs: float) -> float:
        """The expected time of so many runs of any networks."""
        return runs * (median(self.run_seconds) + epochs * max(self.epoch_seconds.values()))

    def _seconds_of_all(self, networks: int, rates: Sequence[float], short: int, epochs: float) -> float:
        """The expected time of the tries of so many networks, and of the fewest runs of the finalists."""
        tries, runs = len(rates) * networks if len(rates) > 1 else 0, FEWEST_RUNS * min(networks, FINALISTS)
        return self._training_seconds(tries, short) + self._training_seconds(runs, epochs)

    def _shorten_tries(self) -> None:
        """Make the tries so short that they and full runs fit into the time that is left, or leave them out."""
        rates, networks = self.plan["rates"], len(self.rows)
        if len(rates) == 1:
            return
        for short in range(self.plan["short"], 1, -1):
            if self._seconds_of_all(networks, rates, short, short / SHORT) <= PLANNED * self.left:
                self.keep(short=short)
                return
        self._leave_out_tries()

    def _leave_out_tries(self) -> None:
        """Train all networks at the rate of the recipe: the same tuning for all, or none."""
        for row in self.rows.values():
            row.tries.clear()
        self.keep(rates=[1.0])
        self.tell("There is no time to try learning rates: all networks train at that of the recipe.")

    def _learn_speed(self, name: str, wall: float, epochs: float, speed: float | None) -> None:
        if speed:
            self.epoch_seconds[name] = (len(self.data.train) - self._held) / speed
            self.run_seconds.append(max(0.0, wall - epochs * self.epoch_seconds[name]))

    def _finalists(self) -> list[str]:
        """The networks that are trained in full: dense, the best thin and low-rank one, and one more.

        Best is what lies highest above everything that is as fast, on the images held out.
        """
        if "finalists" in self.plan:
            return self.plan["finalists"]
        rows = list(self.rows.values())
        scores = {
            row.name: max((max(one.accuracies, default=0.0) for one in row.tries), default=0.0) for row in rows
        }

        def above(row: DesignRow) -> float:
            ms = self.ms(row)
            rivals = [scores[one.name] for one in rows if one is not row and SAME_TIME * self.ms(one) <= ms]
            return scores[row.name] - max(rivals, default=0.0)

        ranked = sorted((row for row in rows if kind_of(row) != DENSE_NAME), key=above, reverse=True)
        if self.wish.at_most is not None:
            in_time = [row for row in ranked if self.ms(row) <= self.wish.at_most]
            ranked = in_time or ranked
        kinds = [next((row for row in ranked if kind_of(row) == kind), None) for kind in (THIN, LOW_RANK)]
        first = [row for row in kinds if row is not None]
        chosen = [*first, *(row for row in ranked if row not in first)][: FINALISTS - 1]
        names = [DENSE.name, *(row.name for row in sorted(chosen, key=rows.index))]
        self.keep(finalists=names)
        return names

    def ms(self, row: DesignRow) -> float:
        ms = self.found.ms(row)
        assert ms is not None
        return ms

    def _train(self, names: Sequence[str]) -> None:
        """All finalists with the first seed before the second, so that all are treated alike."""
        if "epochs" not in self.plan:
            once, each = self._seconds(names, 0), self._seconds(names, 1) - self._seconds(names, 0)
            fitting = int((PLANNED * self.left / FEWEST_RUNS - once) / each)
            self.keep(epochs=max(1, min(self.recipe.epochs, fitting)))
        rows = [self.rows[name] for name in names]
        for seed in range(1, MOST_RUNS + 1):
            missing = [row for row in rows if seed not in row.seeds]
            # The time alone ends the runs: if results did, chance would look like a gain.
            if seed > FEWEST_RUNS and missing and self._seconds(names, self.plan["epochs"]) > PLANNED * self.left:
                break
            if seed > 1 and missing and self._seconds(names, self.plan["epochs"]) > self.left:
                self.tell(f"The time is over after {counted(seed - 1, 'run')} of each network.")
                break
            for row in missing:
                told = f"run {seed} of {in_words(row)}"
                step(told)
                try:
                    self._run_once(row, seed, self.plan["epochs"], told)
                except NotFiniteError:
                    row.failed.append(seed)
                    self.keep()
                    self.tell(f"{told}: the loss was not finite")

    def _seconds(self, names: Sequence[str], epochs: int) -> float:
        """The expected time of one run of each network."""
        for name in names:
            # One that begins from the trained dense network cannot train before that one has.
            if name not in self.epoch_seconds and (name == DENSE.name or not self.pretrained) and self.left > 0:
                self._probe(name)
        slowest = max(self.epoch_seconds.values())
        each = (median(self.run_seconds) + epochs * self.epoch_seconds.get(name, slowest) for name in names)
        return sum(each)

    def _run_once(self, row: DesignRow, seed: int, epochs: int, told: str) -> None:
        """Train a network, test it where it will run, and write its answers into the record."""
        began = time.monotonic()
        few, folder = self.data.holdout(self._held, seed), self.folder(row, seed)
        few = replace(few, details={**few.details, "held_out_of": self.data.digest})  # one set to the page
        record = self._fit(row.design, few, epochs=epochs, rate=row.rate, seed=seed, out=folder, told=told)
        trained = self.trained(row, seed)
        target = self.target
        step(f"{told} is tested")
        deployed = target.deployed(trained, few, folder)
        held_out = target.answers(deployed, few).double().mean().item() if deployed else record.result["top1"]
        right = target.answers(deployed or trained, self.data)
        wall = time.monotonic() - began
        self._learn_speed(row.name, wall, epochs, record.result["images_per_second"])
        self.found.add_run(
            row,
            seed,
            pack(right),
            seconds=record.result["seconds"],
            wall=wall,
            images_per_second=record.result["images_per_second"],
            train_accuracy=record.history[-1]["train_accuracy"],
            held_out=held_out,
        )
        self.keep()
        self.tell(f"{told}, {100 * held_out:.1f}% held out; {self.time_left}")

    def trained(self, row: DesignRow, seed: int) -> Trained:
        """The network of a run, as its folder holds it."""
        design = DENSE if self.pretrained else row.design
        return load_checkpoint(self.folder(row, seed), network=self.builder(design))

    def folder(self, row: DesignRow, seed: int) -> Path:
        folder = self.found.folder
        return below(folder, folder / "runs" / f"{in_words(row).replace(' ', '-')}-{seed}")
