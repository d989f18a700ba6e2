"""A run before it starts: its network, data and options, and the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.data import Data
from lowrank_cnn.data.dataset import DatasetSplit
from lowrank_cnn.data.types import Decode
from lowrank_cnn.method.inputs import InputSize, checked_size, is_example
from lowrank_cnn.method.rewriting import in_channels_last
from lowrank_cnn.models.rebuild import run_entry
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.system.text import counted
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.directory import RunDirectory, check_same_images, check_same_run
from lowrank_cnn.train.execution import COMPILED, EAGER, Compile, StepBuilder, resolved
from lowrank_cnn.train.fabric import resolve_precision
from lowrank_cnn.train.fused_copy import fused_to_train
from lowrank_cnn.train.inputs import Inputs, make_inputs
from lowrank_cnn.train.objective import Loss, Objective, class_balance, make_teacher
from lowrank_cnn.train.optimizers import in_evaluation
from lowrank_cnn.train.progress import Progress
from lowrank_cnn.train.recipe import Recipe, differences, in_words
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.trained import Trained
from lowrank_cnn.train.trainer import Callback

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ExecutionOptions:
    """Settings that affect speed and memory, not results, except that a GPU decodes images a little differently.

    `compile` is "auto" to train through torch.compile where that is measured to be faster.
    """

    compile: Compile = "auto"
    cuda_graphs: bool = True
    recompute: bool = False
    workers: int = 0
    decode: Decode = "cpu"

    def __post_init__(self) -> None:
        if self.compile not in (True, False, "auto"):
            raise LowRankError(f'compile is True, False or "auto", not {self.compile!r}.')
        if self.compile is True and self.recompute:
            raise LowRankError(
                "compile and checkpoint_activations exclude each other: torch traces no such stages."
            )


@dataclass(frozen=True)
class Extras:
    """What the user's code adds to a run: a loss, functions called after each epoch, and a teacher."""

    loss: Loss | None = None
    callbacks: Sequence[Callback] = ()
    teacher: nn.Module | Trained | str | Path | None = None

    def check(self, recipe: Recipe) -> None:
        """Refuse what would have no effect: a teacher and class weights are parts of our own loss."""
        if self.loss is None:
            return
        if not callable(self.loss):
            raise LowRankError(f"a loss is a function of outputs and targets, not {self.loss!r:.60}.")
        learned = self.loss.named_parameters() if isinstance(self.loss, nn.Module) else ()
        if name := next((name for name, parameter in learned if parameter.requires_grad), ""):
            raise LowRankError(
                f"the loss has parameters ({name}), and fit trains those of the network: make them a part of the "
                "network, or freeze them by loss.requires_grad_(False)."
            )
        if self.teacher is not None:
            raise LowRankError("a loss of your own takes the place of the teacher's: ask the teacher within it.")
        if recipe.class_weights != "none":
            raise LowRankError("a loss of your own weighs classes itself: set class_weights=none.")


@dataclass
class Job:
    """The arguments of `fit`; a precision of "auto" becomes that of the device."""

    fabric: Fabric
    model: nn.Module
    data: Data
    recipe: Recipe
    seed: int
    precision: str
    options: ExecutionOptions
    directory: RunDirectory | None
    shown: Progress
    extras: Extras = field(default_factory=Extras)
    about: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.precision = resolve_precision(self.precision, self.fabric.device.type)
        if self.recipe.quantize != "none":
            self._check_quantize()
        # Now: later the layers of the model are replaced by faster ones.
        self.about = about(self.model, self.data, self.seed)

    def _check_quantize(self) -> None:
        if self.options.compile is True or self.options.recompute:
            raise LowRankError("quantize trains layer by layer: leave compile and checkpoint_activations out.")
        if self.fabric.world_size > 1:
            raise LowRankError("quantize trains in one process: start it without torchrun, on one device.")
        if self.precision == "fp16":
            raise LowRankError("quantize rounds in fp32 or bf16, and fp16 rounds small steps away: set precision.")

    def finished(self) -> Record | None:
        """The record of this run, if it has finished."""
        if self.directory is None or not (done := self.directory.finished(self.recipe, self.shown.say)):
            return None
        check_same_run(vars(done), self.about)
        differ = differences(done.recipe, self.recipe.to_dict())
        epochs, _ = differ.pop("epochs", (self.recipe.epochs, None))
        if differ:
            raise LowRankError(f"the run in {self.directory.path} has finished with {in_words(differ)}.")
        fewer = f" its {counted(done.recipe['epochs'], 'epoch')}" if epochs != self.recipe.epochs else ""
        self.shown.say(f"The run in {self.directory.path} has finished{fewer}: nothing is left to do.")
        return done

    def saved(self, *, resume: bool) -> Checkpoint | None:
        """The checkpoint to continue from, if any; without `resume`, refuses a directory that holds a run."""
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
            check_same_images(self.data, checkpoint, self.shown.say)
        elif self.directory.kept_nothing():
            where = self.directory.path
            raise LowRankError(
                f"the run in {where} has finished and kept no weights to go on from: choose another --out."
            )
        else:
            self.shown.say(f"There is nothing to resume in {self.directory.path} yet: the run starts anew.")
        return checkpoint

    def inputs(self, checkpoint: Checkpoint | None) -> Inputs:
        """The batches of the run, preprocessed as before if it continues from a checkpoint."""
        device = self.fabric.device
        return make_inputs(
            self.data,
            self.recipe,
            seed=self.seed,
            device=device,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            workers=self.options.workers,
            decode=self.options.decode,
            # The first conv would round its images to bf16 anyway; on a GPU it then reads half the bytes.
            dtype=_HALVES.get(self.precision, torch.float32) if device.type == "cuda" else torch.float32,
            saved=checkpoint.part("preprocess") if checkpoint else None,
        )

    def step_builder(self, size: InputSize, checkpoint: Checkpoint | None) -> StepBuilder:
        """The ways to run the model in training, with its stages recomputed or compiled as the options say."""
        placed = self.laid_out(size)
        if self.options.recompute and placed is self.model:
            placed = recomputed(placed).train()
        forwards: dict[str, nn.Module] = {}
        compile = resolved(
            self.options.compile,
            # What is faster is decided by times, which differ from run to run: not where bits must repeat.
            able=self.graphs
            and self.recipe.quantize == "none"
            and not self.options.recompute
            and not torch.are_deterministic_algorithms_enabled(),
            before=checkpoint.state.get("execution", {}) if checkpoint else {},
        )
        if compile is not True:
            forwards[EAGER] = self.fabric.setup_module(placed)
        if compile:
            forwards[COMPILED] = self._compiled(placed)
        return StepBuilder(forwards, self.graphs, self.shown.say)

    def _compiled(self, placed: nn.Module) -> nn.Module:
        """The model compiled by torch; dropout draws the same numbers as without, so that results are the same."""
        compiled: Any = torch.compile(placed, dynamic=False, options={"fallback_random": True})
        # Fabric would take the compiler off and put it on again around its own wrapper.
        return self.fabric.setup_module(compiled, _reapply_compile=False)

    @property
    def graphs(self) -> bool:
        """Whether steps may be CUDA graphs: by one process, on a CUDA device, of one input, by our own loss."""
        several = isinstance(self.data.test, DatasetSplit) and self.data.test.example is not None
        alone = self.fabric.device.type == "cuda" and self.fabric.world_size == 1 and not several
        return self.options.cuda_graphs and alone and self.extras.loss is None

    def objective(self, inputs: Inputs) -> Objective:
        """The loss that the run minimises."""
        recipe, device = self.recipe, self.fabric.device
        weights = teacher = None
        if recipe.class_weights == "balanced":
            weights = class_balance(self.data.train, len(self.data.classes)).to(device)
        if self.extras.teacher is not None:
            if is_example(inputs.size):
                raise LowRankError("a teacher takes one image, and this network has several inputs: leave it out.")
            given, autocast = self.extras.teacher, self.fabric.autocast
            size = checked_size(inputs.size)
            teacher = make_teacher(given, self.data, inputs.preprocess, device, autocast, size)
        return Objective(recipe, class_weights=weights, loss=self.extras.loss, teacher=teacher)

    def laid_out(self, size: InputSize) -> nn.Module:
        """The model in channels_last, with its layers fused where that is possible and faster."""
        in_channels_last(self.model)
        if self.recipe.dropout is not None:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = self.recipe.dropout
        if self.fabric.device.type != "cuda":
            return self.model
        # Launched one by one, fused layers cost the host more than they save the device: graphs alone gain.
        # What is fused, and which algorithm cuDNN takes, is decided by times, which differ from run to run.
        repeatable = torch.are_deterministic_algorithms_enabled()
        # A fused batch norm cannot be frozen, and a fused layer does not round.
        frozen = bool(self.recipe.freeze or in_evaluation(self.model))
        apart = frozen or self.recipe.quantize != "none"
        gains = self.graphs and not repeatable and not apart
        running = self.model
        if gains:
            running = fused_to_train(running, checked_size(size), self.shown.say, recompute=self.options.recompute)
        torch.backends.cudnn.benchmark = not repeatable  # not before: a few images need no search
        return running

    def record(self, inputs: Inputs) -> Record:
        """The record of the run, with no history yet."""
        decoded = {"decode": self.options.decode} if self.options.decode != "cpu" else {}
        return Record(
            **(self.about | {"data": self.about["data"] | decoded}),
            recipe=self.recipe.to_dict(),
            watched=inputs.watched,
            precision=self.precision,
            device=str(self.fabric.device),
            processes=self.fabric.world_size,
            begun_from=notes(self.model).begun_from,
        )


def about(model: nn.Module, data: Data, seed: int) -> dict[str, Any]:
    """The identity of a run: its network, its data and its seed."""
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
