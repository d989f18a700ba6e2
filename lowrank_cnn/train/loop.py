"""The training loop. It reads from top to bottom: a run, its epochs, their steps, what happens between them, and
what a run saves to continue later from any step.

`fit` prepares everything that the loop needs: batches (`inputs`), the update of the weights and the fastest way to
run it (`step`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import is_finite
from lowrank_cnn.core.errors import option
from lowrank_cnn.core.modules import call, checked_size, is_example
from lowrank_cnn.method.branches import DenseHelpers
from lowrank_cnn.method.rewrite import in_channels_last
from lowrank_cnn.train.distributed import (
    conditions,
    copy_from_first,
    from_all,
    generator_states,
    restore_generators,
    sum_over_processes,
)
from lowrank_cnn.train.evaluate import Evaluation, LossEvaluation, averaged_views, score, score_by_loss
from lowrank_cnn.train.failure import (
    Interrupted,
    NotFiniteError,
    StoppedWithin,
    StopRequest,
    first_not_finite,
    resume_hint,
    stopping_within,
)
from lowrank_cnn.train.inputs import Inputs
from lowrank_cnn.train.objective import Objective
from lowrank_cnn.train.optimizers import LevelOff, freeze_parameters, in_evaluation, learning_rate
from lowrank_cnn.train.progress import Progress
from lowrank_cnn.train.recipe import Recipe, RunSettings
from lowrank_cnn.train.run_folder import RECORD, Checkpoint, Epoch, Position, Record, RunDirectory, recipe_changes
from lowrank_cnn.train.step import Tally, TrainingStep, build_update, copy_into, fused_to_train, put_back

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ABOUT = ("model", "recipe", "data", "seed", "processes")
"""Fields of the record that a checkpoint holds too: by them, another run is not resumed from it."""
Callback = Callable[[Epoch, nn.Module], object]
"""Called after every epoch with its figures and the network; if it returns True, the run ends.

A callback with a number `changes_until` changes the network after that epoch for the last time, into the form that
the run is for. Until then no weights count as the best, and accuracy does not end the run.
"""
LOOK_EVERY = 10
"""Steps after which several processes agree on whether to save or stop; a process alone looks after each."""


@dataclass(eq=False)
class Trainer:
    """One run: its network, its data, and its state.

    A resumed run has the `execution` of its checkpoint in `record`; `restore` sets the rest.
    """

    fabric: Fabric
    network: nn.Module
    inputs: Inputs
    recipe: Recipe
    how: RunSettings
    record: Record
    objective: Objective
    directory: RunDirectory | None
    helpers: DenseHelpers | None
    callbacks: Sequence[Callback]
    progress: Progress

    def __post_init__(self) -> None:
        fabric, network, recipe, ran = self.fabric, self.network, self.recipe, self.record.execution
        plain = self.objective.loss is None and not is_example(self.inputs.size)
        alone = fabric.device.type == "cuda" and fabric.world_size == 1
        self.graphs = alone and plain and self.how.cuda_graphs
        self.compiled = bool(ran.get("compiled") if self.how.compile is None else self.how.compile)
        running: Any = running_network(self, self.progress.say)
        if self.compiled:
            # Dropout draws the same numbers as without the compiler, so that results are the same.
            running = torch.compile(running, dynamic=False, options={"fallback_random": True})
        # Fabric would take the compiler off and put it on again around its own wrapper.
        forward = fabric.setup_module(running, _reapply_compile=not self.compiled)
        self.frozen = [*in_evaluation(network), *freeze_parameters(network, recipe.freeze)]
        options = {"objective": self.objective, "scaled": self.record.precision == "fp16"}
        self.step = TrainingStep(network, forward, fabric.backward, recipe, fabric.device, **options)
        self.position, self.levels = Position(), LevelOff()
        self.saved = ""  # the position of the last checkpoint, in words
        self.unsaved_best: dict[str, Tensor] = {}
        self.update: Callable[[Any, Any], None] | None = None
        self.per_epoch = len(self.inputs.train)
        self.saved_at = self.epoch_began = time.monotonic()
        self.tested: Evaluation | LossEvaluation | None = None
        changes = [getattr(callback, "changes_until", None) for callback in self.callbacks]
        fades = math.ceil(recipe.helper * recipe.epochs)
        self.changes_until = max([fades, *(epoch for epoch in changes if epoch is not None)])
        self.may_change = None in changes  # a callback that tells nothing may change weights after any epoch

    @property
    def iteration(self) -> int:
        """Steps taken so far."""
        return self.position.epoch * self.per_epoch + self.position.batch

    def run(self) -> Evaluation | LossEvaluation:
        """Train to the end of the run, then evaluate the network on the test set."""
        with StopRequest().listening() as stop, self._stoppable(stop):
            if not self.iteration:
                self.save()
            while not self.position.done(self.recipe.epochs):
                self._train_epoch(stop)
                self._finish_epoch()
            self.save()
            # Asked since the last step. Without a folder the end of the run, which takes moments, is not given up.
            if self.directory is not None and any(from_all(self.fabric, bool(stop))):
                raise Interrupted(self._stop_message())
        if self.helpers:
            self.helpers.remove()
        copy_into(self.step.weights, self.step.averages)
        evaluation = self.tested or self._evaluate(self.inputs.test, details=True)
        self._share_findings()
        return evaluation

    def _train_epoch(self, stop: StopRequest) -> None:
        """Take the steps of an epoch that are left."""
        self.epoch_began = time.monotonic() - self.position.epoch_seconds
        self.network.train()
        for module in self.frozen:
            module.eval()
        for images, targets in self.inputs.batches(self.position.epoch, self.position.batch):
            self.step.prepare(self._rate(self.iteration), self.iteration, epochs=self.iteration / self.per_epoch)
            self._fade()
            if self.update is None:
                ways = {"graphs": self.graphs, "compiled": self.compiled, "say": self.progress.say}
                self.update = build_update(self.step, images, targets, **ways)
                self.record.execution = {"compiled": self.compiled, "cuda_graph": self.update is not self.step}
            with contextlib.ExitStack() as undone:
                if self.fabric.device.type == "cpu":  # a step may be stopped after it has changed statistics
                    changed = (*self.network.buffers(), self.step.sums)
                    undone.enter_context(put_back(changed, self.fabric.device, after=StoppedWithin))
                self.update(images, targets)
            self.position.batch += 1
            self._look_around(stop)

    def _fade(self) -> None:
        """Let the share of dense helpers fall; at zero they are removed, and the step is recorded anew."""
        if self.helpers:
            left = 1 - self.iteration / (self.recipe.helper * self.recipe.epochs * self.per_epoch)
            if left > 0:
                self.helpers.factor.fill_(left)
            elif self.helpers.remove():
                self.update = None

    def _rate(self, iteration: int) -> float:
        """The learning rate of an iteration, divided as often as accuracy levelled off or the recipe says."""
        stated = sum(at <= self.position.epoch for at in self.recipe.drop_epochs)
        drops = stated if self.recipe.drop_epochs else len(self.levels.drops)
        return learning_rate(self.recipe, iteration, per_epoch=self.per_epoch, drops=drops)

    def _look_around(self, stop: StopRequest) -> None:
        """Between steps: show progress, save if it is time, and stop if asked to."""
        if self.progress.due():
            self.progress.step(self.step.read_tally(), self._rate(self.iteration), self.iteration)
        if self.fabric.world_size > 1 and self.iteration % LOOK_EVERY:
            return
        late = self.directory is not None and time.monotonic() - self.saved_at >= self.how.checkpoint_every
        wish = max(from_all(self.fabric, 2 if stop else 1 if late else 0))
        if wish:
            self.save()
        if wish == 2:
            raise Interrupted(self._stop_message())

    def _finish_epoch(self) -> None:
        """Evaluate, decide on the learning rate, and move on to the next epoch."""
        tally = self._checked_tally()
        # Each process has collected statistics of its own images. Those of the first are saved: all test by them.
        copy_from_first(self.fabric, self.step.statistics())
        seconds = time.monotonic() - self.epoch_began
        done = self.position.epoch + 1
        watched = self._watch(done)
        row = Epoch(
            epoch=done,
            lr=self._rate(self.iteration - 1),
            train_loss=tally.loss / tally.images,
            train_accuracy=tally.correct / tally.images,
            accuracy=watched.top1 if watched else None,
            seconds=seconds,
            images_per_second=tally.images / seconds,
        )
        self.position.history.append(asdict(row))
        self.progress.epoch(row, self.recipe.epochs)
        self._judge(watched, done)
        answers = [callback(row, self.network) for callback in self.callbacks]
        if any(answer is True for answer in answers):
            self.position.stopped = True
            self.progress.say("A callback has ended the run.")
        self.position.epoch, self.position.batch, self.position.epoch_seconds = done, 0, 0.0
        self.epoch_began = time.monotonic()
        self.step.sums.zero_()

    def _watch(self, done: int) -> Evaluation | LossEvaluation | None:
        """Evaluate on the watched images, if this epoch is to be evaluated, and remember the best weights."""
        if done % self.recipe.evaluate_every and done < self.recipe.epochs:
            return None
        # The last evaluation is the result, unless a callback may still change the weights.
        last = done == self.recipe.epochs and self.inputs.watch is self.inputs.test and not self.may_change
        last = last and done > self.changes_until
        with self.step.averaged():
            found = self._evaluate(self.inputs.watch, details=last)
            self.tested = found if last else None
            better = not self.position.best_epoch or found.rank > self.position.best_accuracy
            if better and done > self.changes_until:
                self.position.best_epoch, self.position.best_accuracy = done, found.rank
                if self.directory is not None:  # the next save writes them
                    self.unsaved_best = {name: t.clone() for name, t in self.step.weights.items()}
        return found

    def _judge(self, watched: Evaluation | LossEvaluation | None, done: int) -> None:
        """Divide the learning rate, or end the run, if accuracy has levelled off."""
        watching = (self.recipe.levels or self.recipe.early_stop) and done > self.changes_until
        if watched is None or not watching:
            return
        verdict = self.levels.update(self.recipe, watched.rank, done)
        if verdict == "drop":
            self.progress.say(f"Accuracy has levelled off: the rate is divided by {self.recipe.drop_factor:g}.")
        if verdict == "stop":
            self.position.stopped = True
            gain = "a smaller learning rate" if self.recipe.levels else "further training"
            self.progress.say(f"Accuracy has levelled off, and {gain} no longer helps: done.")

    def _evaluate(self, loader: Any, *, details: bool = False) -> Evaluation | LossEvaluation:
        def forward(images: Tensor) -> Any:
            with self.fabric.autocast():
                return call(self.network, images)

        if (loss := self.objective.loss) is not None:
            return score_by_loss(self.network, loader.epoch(0), loss, forward=forward)
        data, alone = self.inputs.data, self.fabric.world_size == 1
        return score(
            self.network,
            loader.epoch(0),
            device=self.fabric.device,
            forward=averaged_views(forward, self.recipe),
            add_up=partial(sum_over_processes, self.fabric),
            classes=data.classes if details else (),
            split=data.test if alone else None,  # only a process alone sees the images in their order
        )

    def _checked_tally(self) -> Tally:
        """The sums of the epoch; if an update was refused or spoilt the weights, the error names the layer."""
        tally = self.step.read_tally(partial(sum_over_processes, self.fabric))
        if not tally.halted and is_finite(self.step.weights):
            return tally
        epoch, batch = self.position.epoch, min(tally.steps, self.per_epoch - 1)
        images, _ = next(iter(self.inputs.batches(epoch, batch)))
        place = f"epoch {epoch + 1}, batch {batch + 1}"
        if not is_finite(images):
            raise NotFiniteError(f"an image of {place} has NaN or infinity in it: leave such images out.")
        with self.fabric.autocast():
            where = first_not_finite(self.network, images)
        hint = f"Nothing is saved: start anew with a smaller {option('lr')}."
        if self.saved:
            again = f"go on with {option('resume', True)} and a smaller {option('lr')}"
            hint = f"The state {self.saved} is saved: {again}."
        raise NotFiniteError(f"the loss is not finite at {place}; the first thing that is not: {where}. {hint}")

    @contextlib.contextmanager
    def _stoppable(self, stop: StopRequest) -> Iterator[None]:
        """Let a request to stop interrupt a step, where one can take long: in one process on a CPU."""
        if self.fabric.device.type != "cpu" or self.fabric.world_size > 1:
            yield
            return
        try:
            with stopping_within(self.network, stop):
                yield
        except StoppedWithin as stopped:
            self.save()
            raise Interrupted(self._stop_message()) from stopped

    def _stop_message(self) -> str:
        where = f"Stopped in epoch {self.position.epoch + 1}, after batch {self.position.batch}"
        if self.position.done(self.recipe.epochs):
            where = "Stopped after the last step"
        if self.directory is None:
            return f"{where}; nothing is saved, since no directory was given."
        return f"{where}; all is saved in {self.directory.path}. Go on with {resume_hint()}."

    def save(self) -> None:
        """Write a checkpoint of all processes. A state that is not finite never replaces one that is."""
        self.saved_at = time.monotonic()
        if self.directory is None:
            return
        self._checked_tally()
        self.position.epoch_seconds = time.monotonic() - self.epoch_began
        self._share_findings()
        tensors = self.step.tensors() | {"tally.sums": sum_over_processes(self.fabric, self.step.sums)}
        for name, state in generator_states(self.fabric.device).items():
            tensors |= {f"random.{rank}.{name}": t for rank, t in enumerate(from_all(self.fabric, state))}
        self.update_record()
        if self.fabric.is_global_zero:
            state = {key: getattr(self.record, key) for key in (*ABOUT, "execution")}
            state |= {"position": asdict(self.position), "levels": asdict(self.levels)}
            state["conditions"] = conditions(self.fabric)
            preprocess = {f"preprocess.{name}": t for name, t in self.inputs.preprocess.to_dict().items()}
            # The best first: the state that names it is written only once it is there.
            if self.unsaved_best:
                weights = {f"model.{name}": t for name, t in self.unsaved_best.items()}
                best = Checkpoint(weights | preprocess | self.step.ranges, state)
                self.directory.save(best, self.position.best_epoch * self.per_epoch, kind="best", keep=1)
            splits = {"train": self.inputs.data.train, "test": self.inputs.data.test}
            # By these, a resumed run knows whether images were changed since.
            images = {
                f"images.{name}.{key}": t for name, split in splits.items() for key, t in split.contents().items()
            }
            self.directory.save(Checkpoint(tensors | preprocess | images, state), self.iteration)
            self.record.save(self.directory.path / RECORD, parents=False)
        self.unsaved_best = {}
        self.saved = self.position.told(self.recipe.epochs)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with the generators of this process, and say which settings have changed."""
        say = self.progress.say
        changes = recipe_changes(checkpoint.state["recipe"], self.recipe)
        before = checkpoint.state["conditions"]
        changes |= {
            name: (before[name], now) for name, now in conditions(self.fabric).items() if before[name] != now
        }
        self.step.load(checkpoint.tensors)
        if self.fabric.global_rank:
            self.step.sums.zero_()  # the first process continues with the sums of all
        if states := checkpoint.part(f"random.{self.fabric.global_rank}"):
            restore_generators(states, self.fabric.device)
        self.position = Position(**checkpoint.state["position"])
        self.levels = LevelOff(**checkpoint.state["levels"])
        self.saved = self.position.told(self.recipe.epochs)
        stored = self.directory and [self.directory.stems("best", end) for end in (".json", ".safetensors")]
        if self.position.best_epoch and self.directory and stored and not all(stored):
            say(
                f"The best weights, of epoch {self.position.best_epoch}, are gone from {self.directory.path}: "
                "the best of the epochs to come are kept."
            )
            self.position.best_epoch, self.position.best_accuracy = 0, -1.0
        for field, (before, now) in changes.items():
            say(f"From here on, {field} is {now}; it was {before}.")
            self.position.changes.append({"epoch": self.position.epoch, "field": field, "from": before, "to": now})
        say(f"Resuming in epoch {self.position.epoch + 1}, after batch {self.position.batch}.")

    def _share_findings(self) -> None:
        """Tell every process of the bad images that any has found, and of the digests that it has taken."""
        for split in (self.inputs.data.train, self.inputs.data.test):
            if (digests := split.contents().get("digests")) is not None:
                digests.copy_(torch.stack(from_all(self.fabric, digests)).amax(0))
            for found in from_all(self.fabric, split.problems.found):
                split.problems.add_all(found)

    def update_record(self) -> None:
        data = self.inputs.data
        self.record.history, self.record.changes = self.position.history, self.position.changes
        self.record.data["problems"] = {"train": data.train.problems.counts, "test": data.test.problems.counts}

    def close(self, status: str) -> None:
        self.update_record()
        self.record.status = status
        if self.directory and self.fabric.is_global_zero:
            self.record.save(self.directory.path / RECORD, parents=False)


def running_network(trainer: Trainer, say: Callable[[str], None]) -> nn.Module:
    """The network in channels_last as it is run: fused if that is possible and faster."""
    network, recipe = trainer.network, trainer.recipe
    in_channels_last(network)
    if recipe.dropout is not None:
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = recipe.dropout
    # Measured times decide what is fused and which algorithm cuDNN takes. They differ from run to run.
    repeats = torch.are_deterministic_algorithms_enabled()
    running = network
    # A fused batch norm cannot be frozen, and a fused layer does not round. Launched one by one, fused layers cost
    # the host more than they save the device: graphs alone gain.
    if trainer.graphs and not (
        repeats or recipe.freeze or in_evaluation(network) or recipe.quantize != "none" or recipe.helper
    ):
        running = fused_to_train(network, checked_size(trainer.inputs.size), say)
    if trainer.fabric.device.type == "cuda":
        torch.backends.cudnn.benchmark = not repeats  # not before: a few images need no search
    return running
