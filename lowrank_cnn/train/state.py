"""The state of a run: where it stands, put down with all that it needs to go on, and picked up again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowrank_cnn.train import launch
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.inputs import Inputs
from lowrank_cnn.train.randomness import generator_states, restore_generators
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.step import Step, copy_into

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ABOUT = ("model", "recipe", "data", "seed", "processes")
"""What a checkpoint says of its run: going on with another is refused by it."""


@dataclass
class Position:
    """Where a run stands: `epoch` epochs are done, and `batch` batches of the next."""

    epoch: int = 0
    batch: int = 0
    stopped: bool = False
    epoch_seconds: float = 0.0
    best_epoch: int = 0
    best_accuracy: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Keeper:
    """Writes and reads what a run keeps in its directory: tensors, generators, the best weights, the record."""

    fabric: Fabric
    step: Step
    inputs: Inputs
    record: Record
    unsaved_best: dict[str, Tensor] = field(default_factory=dict)

    def hold_best(self) -> None:
        """Remember the weights as they are now; the next save writes them."""
        self.unsaved_best = {name: t.clone() for name, t in self.step.weights.items()}

    def save(self, directory: RunDirectory, state: dict[str, Any], *, iteration: int, best: int) -> None:
        """Put the state of all processes down, and the weights held since the last time, of iteration `best`."""
        shared = self._random_states() | {"tally.sums": launch.add_up(self.fabric, self.step.sums)}
        if self.fabric.is_global_zero:
            state = state | {key: getattr(self.record, key) for key in ABOUT}
            preprocess = {f"preprocess.{name}": t for name, t in self.inputs.preprocess.to_dict().items()}
            # The best first: the state that names it is written only once it is there.
            if self.unsaved_best:
                weights = {f"model.{name}": t for name, t in self.unsaved_best.items()}
                directory.store.save(Checkpoint(weights | preprocess, state), best, kind="best", keep=1)
            tensors = self.step.tensors() | preprocess | shared
            directory.store.save(Checkpoint(tensors, state), iteration)
            directory.write_record(self.record)
        self.unsaved_best = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Pick up the tensors and the generators of this process."""
        copy_into(self.step.tensors(), {n: checkpoint.tensors[n] for n in self.step.tensors()})
        if self.fabric.global_rank:
            self.step.sums.zero_()  # those of all processes, which the first goes on with
        if states := checkpoint.part(f"random.{self.fabric.global_rank}"):
            restore_generators(states, self.fabric.device)

    def _random_states(self) -> dict[str, Tensor]:
        states = generator_states(self.fabric.device)
        gathered = {name: launch.gather(self.fabric, state) for name, state in states.items()}
        return {f"random.{r}.{name}": t for name, tensors in gathered.items() for r, t in enumerate(tensors)}
