"""The loop itself: epochs of steps, a look around between them, a state that can be put down at any step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train import failure, launch
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.execution import Ways
from lowrank_cnn.train.failure import Interrupted, NotFiniteError, StopRequest
from lowrank_cnn.train.inputs import Inputs
from lowrank_cnn.train.interrupting import StepStart, StoppedWithin, stopping_within
from lowrank_cnn.train.objective import Objective
from lowrank_cnn.train.optimizers import freeze
from lowrank_cnn.train.progress import Progress
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.record import Epoch, Record
from lowrank_cnn.train.schedule import LevelOff, learning_rate, replayed_drops
from lowrank_cnn.train.score import Evaluation, LossEvaluation, score, score_by_loss
from lowrank_cnn.train.short_runs import averaged_views
from lowrank_cnn.train.state import Keeper, Position
from lowrank_cnn.train.step import Step, Tally, copy_into

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Callback = Callable[[Epoch, nn.Module], object]
"""Called after every epoch with its figures and the network; where it answers True, the run ends."""
LOOK_EVERY = 10
"""Steps between two looks around where several processes must agree on what they see; alone, each step."""


class Trainer:
    """One run: its network, its data, and where it stands."""

    def __init__(
        self,
        fabric: Fabric,
        network: nn.Module,
        ways: Ways,
        inputs: Inputs,
        recipe: Recipe,
        record: Record,
        *,
        directory: RunDirectory | None = None,
        checkpoint_every: float = 30.0,
        objective: Objective | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.fabric, self.network, self.inputs = fabric, network, inputs
        self.recipe, self.record = recipe, record
        self.directory, self.checkpoint_every = directory, checkpoint_every
        self.ways = ways
        self.callbacks, self.frozen = callbacks, freeze(network, recipe.freeze)
        forward = next(iter(ways.forwards.values()))
        options = {"objective": objective, "scaled": record.precision == "fp16"}
        self.step = Step(network, forward, fabric.backward, recipe, fabric.device, **options)
        self.keeper = Keeper(fabric, self.step, inputs, record)
        self.update: Callable[[Tensor, Tensor], None] | None = None
        patience = recipe.patience if recipe.levels else max(1, recipe.early_stop)
        self.levels = LevelOff(patience, recipe.levels, recipe.min_delta)
        self.position, self.progress = Position(), Progress()
        self.saved: Position | None = None
        self.per_epoch = len(inputs.train)
        self.saved_at = self.epoch_began = time.monotonic()
        self.step_start: StepStart | None = None

    @property
    def iteration(self) -> int:
        return self.position.epoch * self.per_epoch + self.position.batch

    @property
    def drops(self) -> int:
        """How often the learning rate has been divided so far."""
        replayed = replayed_drops(self.recipe.drop_epochs, self.position.epoch)
        return replayed if self.recipe.drop_epochs else len(self.levels.drops)

    def run(self) -> Evaluation | LossEvaluation:
        """Train from where the run stands to its end, and evaluate what came of it on the test set."""
        with StopRequest().listening() as stop, self._stoppable(stop):
            if not self.iteration:
                self.save()
            while self.position.epoch < self.recipe.epochs and not self.position.stopped:
                self._train_epoch(stop)
                self._close_epoch()
            self.save()
        copy_into(self.step.weights, self.step.averages)
        evaluation = self._evaluate(self.inputs.test, details=True)
        self._share_problems()
        return evaluation

    @contextlib.contextmanager
    def _stoppable(self, stop: StopRequest) -> Iterator[None]:
        """Leave within a step where one may take long: on a CPU, and by a process that is alone."""
        if self.fabric.device.type != "cpu" or self.fabric.world_size > 1:
            yield
            return
        try:
            with stopping_within(self.network, stop):
                yield
        except StoppedWithin as stopped:
            if self.step_start:
                self.step_start.restore()
            self.save()
            words = failure.farewell(self.position, self.directory and self.directory.path)
            raise Interrupted(words) from stopped

    def save(self) -> None:
        """Put the state down. A state that is not finite is never written over one that is."""
        self.saved_at = time.monotonic()
        if self.directory is None:
            return
        self._check_finite(self._tally())
        self.position.epoch_seconds = time.monotonic() - self.epoch_began
        self._share_problems()
        self._write(self.directory)

    def _write(self, directory: RunDirectory, *, held: bool = False) -> None:
        self.update_record()
        state = {
            "position": asdict(self.position),
            "levels": self.levels.state(),
            "execution": self.record.execution,
        }
        best = self.position.best_epoch * self.per_epoch
        self.keeper.save(directory, state, iteration=self.iteration, best=best, held=held)
        self.saved = replace(self.position)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Pick the state up again, every generator included."""
        self.keeper.restore(checkpoint)
        self.position = Position(**checkpoint.state["position"])
        self.levels.restore(checkpoint.state["levels"])
        self.saved = replace(self.position)

    def update_record(self) -> None:
        """Bring the record up to where the run stands."""
        data = self.inputs.data
        self.record.history, self.record.changes = self.position.history, self.position.changes
        self.record.data["problems"] = {
            "train": data.train.problems.counts,
            "test": data.test.problems.counts,
        }

    def _share_problems(self) -> None:
        """Let every process know of the bad images that any has met."""
        for split in (self.inputs.data.train, self.inputs.data.test):
            for found in launch.gather_objects(self.fabric, split.problems.found):
                split.problems.add_all(found)

    def _train_epoch(self, stop: StopRequest) -> None:
        self.epoch_began = time.monotonic() - self.position.epoch_seconds
        self.network.train()
        for module in self.frozen:
            module.eval()
        for images, targets in self.inputs.batches(self.position.epoch, self.position.batch):
            self.step.prepare(self._rate(self.iteration), self.iteration, epochs=self.iteration / self.per_epoch)
            self.update = self.update or self._make_update(images, targets)
            if self.fabric.device.type == "cpu":
                self.step_start = StepStart.of(self.network, self.fabric.device)
            self.update(images, targets)
            self.step_start = None
            self.position.batch += 1
            self._look_around(stop)

    def _rate(self, iteration: int) -> float:
        return learning_rate(self.recipe, iteration, per_epoch=self.per_epoch, drops=self.drops)

    def _make_update(self, images: Tensor, labels: Tensor) -> Callable[[Tensor, Tensor], None]:
        """The step by the fastest way there is; the record says by which."""
        self.ways.say = self.progress.say
        left = self.recipe.epochs * self.per_epoch - self.iteration
        update, execution = self.ways.choose(self.step, images, labels, steps_left=left)
        self.record.execution = asdict(execution)
        return update

    def _look_around(self, stop: StopRequest) -> None:
        """Between steps: show, save when it is time, and leave when asked to."""
        if self.progress.due():
            self.progress.step(self.step.read_tally(), self._rate(self.iteration), self.iteration)
        if self.fabric.world_size > 1 and self.iteration % LOOK_EVERY:
            return
        late = self.directory is not None and time.monotonic() - self.saved_at >= self.checkpoint_every
        wish = launch.agree(self.fabric, 2 if stop else 1 if late else 0)
        if wish:
            self.save()
        if wish == 2:
            raise Interrupted(failure.farewell(self.position, self.directory and self.directory.path))

    def _close_epoch(self) -> None:
        """Count, evaluate, remember the best, judge, and stand at the start of the next epoch."""
        tally = self._tally()
        self._check_finite(tally)
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
        self._call_back(row)
        self.position.epoch, self.position.batch, self.position.epoch_seconds = done, 0, 0.0
        self.epoch_began = time.monotonic()
        self.step.sums.zero_()
        if self.directory is not None and not self.position.done(self.recipe.epochs):
            self.keeper.hold_epoch()

    def _call_back(self, row: Epoch) -> None:
        """Tell the user's functions of the epoch; one that answers True ends the run."""
        answers = [callback(row, self.network) for callback in self.callbacks]
        if any(answer is True for answer in answers):
            self.position.stopped = True
            self.progress.say("A callback has ended the run.")

    def _watch(self, done: int) -> Evaluation | LossEvaluation | None:
        """How the network does on the watched images, where this epoch is to be evaluated."""
        if done % self.recipe.evaluate_every and done < self.recipe.epochs:
            return None
        with self.step.averaged():
            found = self._evaluate(self.inputs.watch)
            if not self.position.best_epoch or found.rank > self.position.best_accuracy:
                self.position.best_epoch, self.position.best_accuracy = done, found.rank
                if self.directory is not None:
                    self.keeper.hold_best()
        return found

    def _judge(self, watched: Evaluation | LossEvaluation | None, done: int) -> None:
        if watched is None or not (self.recipe.levels or self.recipe.early_stop):
            return
        verdict = self.levels.update(watched.rank, done)
        if verdict == "drop":
            self.progress.say(f"Accuracy has levelled off: the rate is divided by {self.recipe.drop_factor:g}.")
        if verdict == "stop":
            self.position.stopped = True
            gain = "a smaller learning rate" if self.recipe.levels else "further training"
            self.progress.say(f"Accuracy has levelled off, and {gain} no longer helps: done.")

    def _evaluate(self, loader: Any, *, details: bool = False) -> Evaluation | LossEvaluation:
        def forward(images: Tensor) -> Any:
            with self.fabric.autocast():
                return self.network(images)

        if own := self.step.objective.own:
            return score_by_loss(self.network, loader.epoch(0), own, forward=forward)
        data, alone = self.inputs.data, self.fabric.world_size == 1
        return score(
            self.network,
            loader.epoch(0),
            device=self.fabric.device,
            forward=averaged_views(forward, self.recipe),
            add_up=partial(launch.add_up, self.fabric),
            classes=data.classes if details else (),
            describe=data.test.describe if alone else None,  # a process alone meets the images in their order
        )

    def _tally(self) -> Tally:
        return self.step.read_tally(partial(launch.add_up, self.fabric))

    def _check_finite(self, tally: Tally) -> None:
        """Where an update was refused or has spoilt the weights, meet that batch again and name the layer."""
        if not tally.halted and failure.all_finite(self.step.weights.values()):
            return
        batch = min(tally.steps, self.per_epoch - 1)
        images, _ = next(iter(self.inputs.batches(self.position.epoch, batch)))
        with self.fabric.autocast():
            where = failure.first_not_finite(self.network, images)
        epoch = self.position.epoch + 1
        self._save_last_epoch()
        raise NotFiniteError(
            f"the loss is not finite at epoch {epoch}, batch {batch + 1}; "
            f"the first thing that is not: {where}. {failure.way_back(self.saved, self.recipe.epochs)}"
        )

    def _save_last_epoch(self) -> None:
        """Put down what was held at the end of the last epoch, where nothing since was: it was finite then."""
        if self.directory is None or self.saved is None or self.saved.epoch == self.position.epoch:
            return
        if self.fabric.is_global_zero and not self.keeper.epoch_end:  # there was no room for it
            return
        self.position.batch, self.position.epoch_seconds = 0, 0.0
        # On a full disk, what was saved before stands.
        with contextlib.suppress(LowRankError):
            self._write(self.directory, held=True)
