"""The runs of a frontier: each trained by the recipe of its family, tested once, every answer kept."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.data import Data
from lowrank_cnn.frontier.designs import Builder, Design, find_design
from lowrank_cnn.frontier.record import pack
from lowrank_cnn.system.files import below
from lowrank_cnn.train import fit
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.trained import Trained, load_checkpoint

HELD_OUT = 0.1
"""The share of training images that settings are tried on."""
TEACHER_SEED = 2000


@dataclass(frozen=True)
class TrainedDesign:
    """What came of a run: its record, which test images it got right, and the seconds of it all."""

    record: Record
    right: Tensor
    wall: float


@dataclass(frozen=True)
class DesignTrainer:
    """Trains designs on one set of images, on one device, by one recipe."""

    builder: Builder
    data: Data
    recipe: Recipe
    device: str
    teacher: Trained | None = None
    """A trained network that all designs, thin dense ones too, learn from beside the labels."""

    def train(self, design: Design, seed: int, *, rate: float = 1.0) -> TrainedDesign:
        """Train from scratch; `rate` multiplies the learning rate of the recipe."""
        began = time.monotonic()
        torch.manual_seed(seed)
        network = self.builder(design)
        recipe = replace(self._tested_once, lr=rate * self.recipe.lr)
        record = fit(network, self.data, recipe, seed=seed, teacher=self.teacher, **self._how)
        assert record.right is not None
        outcome = TrainedDesign(record, record.right, time.monotonic() - began)
        release_memory()
        return outcome

    def train_teacher(self, design: Design, folder: Path) -> Record:
        """The run of the network that the others learn from, in its own folder; it is made once."""
        torch.manual_seed(TEACHER_SEED)
        how = {"seed": TEACHER_SEED, "out": folder, "resume": True, **self._how}
        return fit(self.builder(design), self.data, self._tested_once, **how)

    @property
    def _tested_once(self) -> Recipe:
        """The recipe, with the test images used once, at the end."""
        return replace(self.recipe, evaluate_every=max(1, self.recipe.epochs))

    @property
    def _how(self) -> dict[str, Any]:
        # Too short to pay for compiling: that is not even tried.
        return {"device": self.device, "compile": False, "progress": False}


@dataclass(frozen=True)
class DesignRun:
    """A run to make. With `held_out`, training images that are held out take the place of the test images."""

    design: Design
    seed: int
    rate: float = 1.0
    held_out: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """What a run found, as plain values for another process: `right` has one bit for each test image.

    `right` is None where the loss was not finite.
    """

    wall: float
    right: bytes | None = None
    correct: int = 0
    images: int = 1
    images_per_second: float = 0.0
    train_accuracy: float = 0.0


@dataclass
class RunMaker:
    """Makes runs, in this process or in another: designs on all images, and on those left by a held-out tenth.

    `teachers` is the folder of the networks that teach, by the design `teacher`.
    """

    trainer: DesignTrainer
    teacher: str = ""
    teachers: Path = Path()
    _trainers: dict[bool, DesignTrainer] = field(default_factory=dict, init=False)

    def __call__(self, run: DesignRun) -> RunOutcome:
        began = time.monotonic()
        try:
            done = self._prepared(run.held_out).train(run.design, run.seed, rate=run.rate)
        except NotFiniteError:
            return RunOutcome(time.monotonic() - began)
        history = done.record.history
        return RunOutcome(
            wall=done.wall,
            right=pack(done.right),
            correct=int(done.right.sum()),
            images=len(done.right),
            images_per_second=done.record.result["images_per_second"],
            train_accuracy=history[-1]["train_accuracy"] if history else 0.0,
        )

    def teach(self, *, held_out: bool) -> Record:
        """Train the teacher of the runs that follow, on the same images as these; one that is there stays."""
        return self._on_images(held_out).train_teacher(find_design(self.teacher), self._folder(held_out))

    def _prepared(self, held_out: bool) -> DesignTrainer:
        if held_out not in self._trainers:
            made = self._on_images(held_out)
            if self.teacher:
                network = made.builder(find_design(self.teacher))
                made = replace(made, teacher=load_checkpoint(self._folder(held_out), network=network))
            self._trainers[held_out] = made
        return self._trainers[held_out]

    def _on_images(self, held_out: bool) -> DesignTrainer:
        data = self.trainer.data
        if not held_out:
            return self.trainer
        return replace(self.trainer, data=data.holdout(round(HELD_OUT * len(data.train)), 0))

    def _folder(self, held_out: bool) -> Path:
        return below(self.teachers, self.teachers / ("teacher-held-out" if held_out else "teacher"))


def release_memory() -> None:
    """Let go of what a run held on the device: graphs keep their memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
