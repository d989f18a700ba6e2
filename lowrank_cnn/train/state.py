"""The state of a run: its position, and everything that a checkpoint saves and restores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowrank_cnn.system.memory import is_out_of_memory, room
from lowrank_cnn.train import launch
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.determinism import conditions
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.inputs import Inputs
from lowrank_cnn.train.randomness import generator_states, restore_generators
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.step import Step, copy_into

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
        """Whether a run of so many epochs is complete."""
        return self.stopped or self.epoch >= epochs

    def told(self, epochs: int) -> str:
        """The position in words, as in "the state after 3 of 10 epochs"."""
        batches = f"{self.batch} batch{'es' * (self.batch != 1)}"
        if not self.epoch:
            return f"after {batches} of the first of {epochs} epochs" if self.batch else "before any training"
        rest = f" and {batches} of the next" if self.batch else ""
        return f"after {self.epoch} of {epochs} epochs{rest}"


@dataclass
class Keeper:
    """Saves and restores what a run keeps in its directory: tensors, generators, the best weights, the record.

    `epoch_end` is a copy of the state at the end of the last epoch, for a run that fails before its next save. It
    stays on the device, where copying is fast, and is made only if there is ample memory.
    """

    fabric: Fabric
    step: Step
    inputs: Inputs
    record: Record
    unsaved_best: dict[str, Tensor] = field(default_factory=dict)
    epoch_end: dict[str, Tensor] = field(default_factory=dict)

    def hold_best(self) -> None:
        """Remember the weights as they are now; the next save writes them."""
        self.unsaved_best = {name: t.clone() for name, t in self.step.weights.items()}

    def hold_epoch(self) -> None:
        """Remember the state of all processes at the end of an epoch; writing it each time would take too long."""
        self.epoch_end = {}  # free the copy of the epoch before
        tensors = self._tensors()
        if self.fabric.is_global_zero and sum(t.nbytes for t in tensors.values()) < room(self.fabric.device) / 4:
            try:
                self.epoch_end = {name: t.detach().clone() for name, t in tensors.items()}
            except RuntimeError as error:  # fragmented memory, say: a run can do without the copy
                if not is_out_of_memory(error):
                    raise

    def save(
        self, directory: RunDirectory, state: dict[str, Any], *, iteration: int, best: int, held: bool = False
    ) -> None:
        """Save the state of all processes (or the held one), and the best weights, of iteration `best`."""
        tensors = self.epoch_end if held else self._tensors()
        if self.fabric.is_global_zero:
            state = state | {key: getattr(self.record, key) for key in ABOUT}
            state["conditions"] = conditions(self.fabric)
            preprocess = {f"preprocess.{name}": t for name, t in self.inputs.preprocess.to_dict().items()}
            # The best first: the state that names it is written only once it is there.
            if self.unsaved_best:
                weights = {f"model.{name}": t for name, t in self.unsaved_best.items()}
                directory.store.save(Checkpoint(weights | preprocess, state), best, kind="best", keep=1)
            directory.store.save(Checkpoint(tensors | preprocess, state), iteration)
            directory.write_record(self.record)
        self.unsaved_best = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the tensors and the generators of this process."""
        copy_into(self.step.tensors(), {n: checkpoint.tensors[n] for n in self.step.tensors()})
        if self.fabric.global_rank:
            self.step.sums.zero_()  # the first process continues with the sums of all
        if states := checkpoint.part(f"random.{self.fabric.global_rank}"):
            restore_generators(states, self.fabric.device)

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that changes during training, gathered over all processes."""
        shared = self._random_states() | {"tally.sums": launch.add_up(self.fabric, self.step.sums)}
        return self.step.tensors() | shared

    def _random_states(self) -> dict[str, Tensor]:
        states = generator_states(self.fabric.device)
        gathered = {name: launch.gather(self.fabric, state) for name, state in states.items()}
        return {f"random.{r}.{name}": t for name, tensors in gathered.items() for r, t in enumerate(tensors)}
