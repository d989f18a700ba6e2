"""The state of a run: how far it is, and everything that a checkpoint saves and restores."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.memory import is_out_of_memory, room
from lowrank_cnn.system.text import counted
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.determinism import conditions, generator_states, restore_generators
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.fabric import gather_objects, gather_tensors, sum_over_processes
from lowrank_cnn.train.inputs import Inputs
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.schedule import LevelOff
from lowrank_cnn.train.step import TrainingStep, copy_into, is_optional

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ABOUT = ("model", "recipe", "data", "seed", "processes")
"""Fields of the record that a checkpoint holds too: by them, another run is not resumed from it."""


@dataclass
class Position:
    """How far a run has come: `epoch` epochs are done, and `batch` batches of the next."""

    epoch: int = 0
    batch: int = 0
    stopped: bool = False
    epoch_seconds: float = 0.0
    best_epoch: int = 0
    best_accuracy: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def done(self, epochs: int) -> bool:
        """Whether a run of this many epochs is complete."""
        return self.stopped or self.epoch >= epochs

    def told(self, epochs: int) -> str:
        """The position in words, as in "the state after 3 of 10 epochs"."""
        batches = counted(self.batch, "batch")
        if not self.epoch:
            return (
                f"after {batches} of the first of {counted(epochs, 'epoch')}"
                if self.batch
                else "before any training"
            )
        rest = f" and {batches} of the next" if self.batch else ""
        return f"after {self.epoch} of {counted(epochs, 'epoch')}{rest}"


@dataclass
class RunState:
    """What a run saves in its directory and restores: position, tensors, generators, best weights, record.

    `saved` is the position of the last checkpoint. `epoch_end` is a copy of the tensors at the end of the last
    epoch, for a run that fails before its next save. It stays on the device, where copying is fast, and is made
    only if there is ample memory. Without a directory nothing is saved.
    """

    fabric: Fabric
    step: TrainingStep
    inputs: Inputs
    record: Record
    levels: LevelOff
    directory: RunDirectory | None = None
    position: Position = field(default_factory=Position)
    saved: Position | None = None
    unsaved_best: dict[str, Tensor] = field(default_factory=dict)
    epoch_end: dict[str, Tensor] = field(default_factory=dict)

    def iteration(self, position: Position | None = None) -> int:
        """Steps taken so far, or up to another position."""
        at = position or self.position
        return at.epoch * len(self.inputs.train) + at.batch

    def hold_best(self) -> None:
        """Remember the weights as they are now; the next save writes them."""
        if self.directory is not None:
            self.unsaved_best = {name: t.clone() for name, t in self.step.weights.items()}

    def hold_epoch(self) -> None:
        """Remember the state of all processes at the end of an epoch; writing it each time would take too long."""
        if self.directory is None:
            return
        self.epoch_end = {}  # free the copy of the epoch before
        tensors = self._tensors()
        if self.fabric.is_global_zero and sum(t.nbytes for t in tensors.values()) < room(self.fabric.device) / 4:
            try:
                self.epoch_end = {name: t.detach().clone() for name, t in tensors.items()}
            except RuntimeError as error:  # fragmented memory, for example: a run can do without the copy
                if not is_out_of_memory(error):
                    raise

    def save(self) -> None:
        """Write the state of all processes."""
        if self.directory is not None:
            self.share_findings()
            self._write(self.directory, self._tensors())

    def save_epoch_end(self) -> None:
        """Write the state at the end of the last epoch, which was finite, unless something newer is saved."""
        if self.directory is None or self.saved is None or self.saved.epoch == self.position.epoch:
            return
        if self.fabric.is_global_zero and not self.epoch_end:  # there was no memory for it
            return
        self.position.batch, self.position.epoch_seconds = 0, 0.0
        with contextlib.suppress(LowRankError):  # on a full disk, the checkpoint before stays the last
            self._write(self.directory, self.epoch_end)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with the generators of this process."""
        # A run that goes on in another precision starts with a fresh loss scale, or fresh ranges of int8.
        known = [name for name in self.step.tensors() if name in checkpoint.tensors or not is_optional(name)]
        copy_into(self.step.tensors(), {name: checkpoint.tensors[name] for name in known})
        if self.fabric.global_rank:
            self.step.sums.zero_()  # the first process continues with the sums of all
        if states := checkpoint.part(f"random.{self.fabric.global_rank}"):
            restore_generators(states, self.fabric.device)
        self.position = Position(**checkpoint.state["position"])
        self.levels.restore(checkpoint.state["levels"])
        self.saved = replace(self.position)

    def update_record(self) -> None:
        """Bring the record up to date."""
        data = self.inputs.data
        self.record.history, self.record.changes = self.position.history, self.position.changes
        problems = {"train": data.train.problems.counts, "test": data.test.problems.counts}
        self.record.data["problems"] = problems

    def share_findings(self) -> None:
        """Tell every process of the bad images that any has found, and of the digests that it has taken."""
        for split in (self.inputs.data.train, self.inputs.data.test):
            if (digests := split.contents().get("digests")) is not None:
                digests.copy_(torch.stack(gather_tensors(self.fabric, digests)).amax(0))
            for found in gather_objects(self.fabric, split.problems.found):
                split.problems.add_all(found)

    def _write(self, directory: RunDirectory, tensors: dict[str, Tensor]) -> None:
        self.update_record()
        if self.fabric.is_global_zero:
            state = {key: getattr(self.record, key) for key in (*ABOUT, "execution")}
            state |= {"position": asdict(self.position), "levels": self.levels.state()}
            state["conditions"] = conditions(self.fabric)
            preprocess = {f"preprocess.{name}": t for name, t in self.inputs.preprocess.to_dict().items()}
            # The best first: the state that names it is written only once it is there.
            if self.unsaved_best:
                weights = {f"model.{name}": t for name, t in self.unsaved_best.items()}
                at = self.iteration(Position(self.position.best_epoch))
                best = Checkpoint(weights | preprocess | self.step.ranges, state)
                directory.store.save(best, at, kind="best", keep=1)
            directory.store.save(Checkpoint(tensors | preprocess | self._images(), state), self.iteration())
            directory.write_record(self.record)
        self.unsaved_best = {}
        self.saved = replace(self.position)

    def _images(self) -> dict[str, Tensor]:
        """What tells later whether images were changed since."""
        splits = {"train": self.inputs.data.train, "test": self.inputs.data.test}
        return {f"images.{name}.{key}": t for name, split in splits.items() for key, t in split.contents().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that changes during training, gathered over all processes."""
        shared = self._random_states() | {"tally.sums": sum_over_processes(self.fabric, self.step.sums)}
        return self.step.tensors() | shared

    def _random_states(self) -> dict[str, Tensor]:
        states = generator_states(self.fabric.device)
        gathered = {name: gather_tensors(self.fabric, state) for name, state in states.items()}
        return {f"random.{r}.{name}": t for name, tensors in gathered.items() for r, t in enumerate(tensors)}
