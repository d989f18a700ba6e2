"""A run before it begins: what is to be trained on what, by which means, and what was saved of it before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.data import Data
from lowrank_cnn.data.types import Decode
from lowrank_cnn.models.rebuild import run_entry
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.directory import RunDirectory, check_same_run
from lowrank_cnn.train.fused import fused_to_train
from lowrank_cnn.train.inputs import Inputs, make_inputs
from lowrank_cnn.train.launch import resolve_precision
from lowrank_cnn.train.progress import Progress
from lowrank_cnn.train.recipe import Recipe, differences, in_words
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.record import Record

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Means:
    """What decides how fast a run is and how much memory it takes, and not what it learns.

    But for `decode`: the pixels of a GPU's decoder differ a little.
    """

    compile: bool = False
    cuda_graphs: bool = True
    recompute: bool = False
    workers: int = 0
    decode: Decode = "cpu"

    def __post_init__(self) -> None:
        if self.compile and self.recompute:
            raise LowRankError(
                "compile and checkpoint_activations exclude each other: torch traces no such stages."
            )


@dataclass
class Job:
    """What `fit` was asked for; a precision of "auto" becomes the one that the device computes in."""

    fabric: Fabric
    model: nn.Module
    data: Data
    recipe: Recipe
    seed: int
    precision: str
    means: Means
    directory: RunDirectory | None
    shown: Progress
    about: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.precision = resolve_precision(self.precision, self.fabric.device.type)
        # At once: later, the model's layers are changed for those that the device likes.
        self.about = about(self.model, self.data, self.seed)

    def finished(self) -> Record | None:
        """The record of this run, where nothing is left to do."""
        if self.directory is None or not (done := self.directory.finished(self.recipe, self.shown.say)):
            return None
        check_same_run(vars(done), self.about)
        differ = differences(done.recipe, self.recipe.to_dict())
        epochs, _ = differ.pop("epochs", (self.recipe.epochs, None))
        if differ:
            raise LowRankError(f"the run in {self.directory.path} has finished with {in_words(differ)}.")
        fewer = f" its {epochs} epochs" if epochs != self.recipe.epochs else ""
        self.shown.say(f"The run in {self.directory.path} has finished{fewer}: nothing is left to do.")
        return done

    def saved(self, *, resume: bool) -> Checkpoint | None:
        """The checkpoint to go on from, if any; a directory that holds a run is only touched to go on with it."""
        if self.directory is None:
            if resume:
                raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
            return None
        if not resume:
            self.directory.check_free()
            return None
        checkpoint = self.directory.resume(self.shown.say)
        if checkpoint:
            check_same_run(checkpoint.state, self.about)
        elif self.directory.kept_nothing():
            where = self.directory.path
            raise LowRankError(
                f"the run in {where} has finished and kept no weights to go on from: choose another --out."
            )
        else:
            self.shown.say(f"There is nothing to resume in {self.directory.path} yet: the run starts anew.")
        return checkpoint

    def inputs(self, checkpoint: Checkpoint | None) -> Inputs:
        """The batches of the run, prepared as before where it goes on from a checkpoint."""
        device = self.fabric.device
        return make_inputs(
            self.data,
            self.recipe,
            seed=self.seed,
            device=device,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            workers=self.means.workers,
            decode=self.means.decode,
            # The first conv would round its images to bf16 anyway; on a GPU it then reads half the bytes.
            dtype=torch.bfloat16 if self.precision == "bf16" and device.type == "cuda" else torch.float32,
            saved=checkpoint.part("preprocess") if checkpoint else None,
        )

    def forward(self, size: tuple[int, int, int]) -> nn.Module:
        """The model as it runs in training: placed, its stages recomputed or compiled as the means say."""
        placed = self.placed(size)
        placed = recomputed(placed).train() if self.means.recompute else placed
        compiled: Any = torch.compile(placed) if self.means.compile else placed
        return self.fabric.setup_module(compiled)

    def placed(self, size: tuple[int, int, int]) -> nn.Module:
        """The model laid out as the device likes it, its layers fused where that can be and gains."""
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.recipe.dropout is not None:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = self.recipe.dropout
        if self.fabric.device.type != "cuda":
            return self.model
        # Launched one by one, fused layers cost the host more than they save the device: graphs alone gain.
        gains = self.means.cuda_graphs and self.fabric.world_size == 1 and not self.means.compile
        placed = fused_to_train(self.model, size, self.shown.say) if gains else self.model
        torch.backends.cudnn.benchmark = True  # not before: two images that compare networks need no search
        return placed

    def record(self, inputs: Inputs) -> Record:
        """The record of the run, with no history yet."""
        decoded = {"decode": self.means.decode} if self.means.decode != "cpu" else {}
        return Record(
            **(self.about | {"data": self.about["data"] | decoded}),
            recipe=self.recipe.to_dict(),
            watched=inputs.watched,
            precision=self.precision,
            device=str(self.fabric.device),
            processes=self.fabric.world_size,
            begun_from=begun_from(self.model),
        )


def begun_from(model: nn.Module) -> str:
    """The trained weights that a network was given, in words."""
    return notes(model).begun_from


def about(model: nn.Module, data: Data, seed: int) -> dict[str, Any]:
    """What makes a run that run: its network, its data and its seed."""
    return {
        "model": run_entry(model),
        "data": {
            "name": data.name,
            "classes": list(data.classes),
            "train": len(data.train),
            "test": len(data.test),
            "image": list(data.test.size or ()),
            "digest": data.digest,
            **data.details,
        },
        "seed": seed,
    }
