"""`fit`: train a network on a data set by a recipe, on whatever machine this is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import InputSize, checked_size, is_example
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.data.own import AsGiven, DatasetSplit, for_classes, loader_batch
from lowrank_cnn.data.types import Decode
from lowrank_cnn.method.count import count
from lowrank_cnn.method.finalize_shapes import settle
from lowrank_cnn.method.rewrite import in_channels_last
from lowrank_cnn.method.select import check_values
from lowrank_cnn.models.build import dense_cost, run_entry
from lowrank_cnn.train.checks import (
    check_memory,
    data_remarks,
    dropout_remarks,
    precision_remarks,
    remarks,
    rounding_remarks,
    step_remarks,
)
from lowrank_cnn.train.distributed import (
    batch_norm_over_all,
    changed_conditions,
    conditions,
    keep_threads,
    launch,
    repeatable,
    resolve_precision,
    seed_generators,
    sum_over_processes,
)
from lowrank_cnn.train.failure import lost_process_as_user_error, told_out_of_memory
from lowrank_cnn.train.inputs import Inputs, augmentation, check_network, input_size, make_inputs, open_for
from lowrank_cnn.train.int8 import ranges_of, trained_in_int8
from lowrank_cnn.train.loop import Callback, Trainer
from lowrank_cnn.train.objective import Loss, Objective, class_balance
from lowrank_cnn.train.optimizers import flags_restored, in_evaluation
from lowrank_cnn.train.progress import Lines, Logged, Progress, check_loggers, moving_line
from lowrank_cnn.train.recipe import Recipe, changed, differences, in_words
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.run_folder import (
    Checkpoint,
    RunDirectory,
    check_same_images,
    check_same_run,
    recipe_changes,
)
from lowrank_cnn.train.score import Evaluation, LossEvaluation, check_classes, check_fits
from lowrank_cnn.train.short_runs import whiten_first_layer
from lowrank_cnn.train.step import COMPILED, EAGER, Compile, StepBuilder, fused_to_train, put_back, resolved
from lowrank_cnn.train.trained import Trained, held_out_part, make_teacher

if TYPE_CHECKING:
    from lightning_fabric import Fabric

# A run before it starts: its network, data and options, and the checkpoint to continue from.

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


@lost_process_as_user_error()
def fit(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str = "modern",
    *,
    loss: Loss | None = None,
    callbacks: Sequence[Callback] = (),
    teacher: nn.Module | Trained | str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    quantize: str | None = None,
    device: str = "auto",
    precision: str | None = None,
    strategy: str = "auto",
    compile: Compile = "auto",
    cuda_graphs: bool = True,
    checkpoint_activations: bool = False,
    workers: int = 0,
    decode: Decode = "cpu",
    deterministic: bool = False,
    progress: bool = True,
    tensorboard: bool = False,
    log: str | Sequence[str] = (),
    checkpoint_every: float = 30.0,
) -> Record:
    """Train `model` in place and return the record of the run, its result measured on the test images.

    >>> record = fit(network, "photos", epochs=10, out="runs/photos")  # doctest: +SKIP
    >>> record.result["top1"]  # doctest: +SKIP
    0.925

    - `data`: what `open_data` gives, or a path that it takes; or a Dataset or DataLoader of your own whose items
      are (image, target), or a pair of them to train and test on. Your own data is taken as it is: the recipe's
      preprocessing and crops are not applied. A DataLoader's batch size replaces the recipe's. In the place of the
      image, a tuple or a dictionary of tensors holds the inputs of a network that takes several.
    - `loss`: a function of the outputs and targets of a batch in place of cross-entropy, for any other task.
    - `callbacks`: functions called after each epoch with its figures and the network; True ends the run.
    - `teacher`: a trained network whose answers count beside the labels (`distill_weight` of the recipe).
    - `epochs`, `batch_size` and `lr` replace those of the recipe; `get_recipe` changes its other fields.
    - `quantize`: "int8" trains with rounded inputs and weights, for a network that loses accuracy when
      `lr.quantize` rounds it after training. Start from trained weights, with a low rate. The result is that of
      the rounded network; its weights stay in float, and `lr.quantize` writes them with the ranges found here.
    - `log`: where the figures of every epoch are sent: "tensorboard", "csv", "wandb", "mlflow", "trackio", or
      several of them.

    With `out`, the run lives in that directory: a checkpoint every `checkpoint_every` seconds, recipe and record
    beside it; `resume=True` goes on from there, or starts where there is nothing yet. The result is that of the
    last weights (their moving average where the recipe keeps one), never of weights chosen on the test set.
    `data` may be a `data.holdout(...)`, for a search that never sees the test set.
    On a GPU, `compile="auto"` trains through torch.compile where the run is long enough to pay for it and a few
    measured steps are faster; True and False decide. Either way a step is one CUDA graph, and the record says
    which.
    `checkpoint_activations` saves memory: stages are computed again in the backward pass.
    `decode="gpu"` lets the GPU decode streamed photographs to train on, which needs torchvision.
    `deterministic` gives the same bits whenever the run is repeated or resumed, on the CPU or on one GPU.
    One process at a time can use `out`.
    Raises `Interrupted`, a KeyboardInterrupt, after Ctrl-C has been answered and the state saved.
    """
    if not isinstance(model, nn.Module):
        hint = "give its .network" if hasattr(model, "network") else "create_model makes one from a name"
        raise LowRankError(f"fit trains an nn.Module, not a {type(model).__name__}: {hint}.")
    check_values(model)
    names = ((log,) if isinstance(log, str) else tuple(log)) + (("tensorboard",) if tensorboard else ())
    check_loggers(names)
    if not checkpoint_every >= 0:  # a NaN is refused too
        raise LowRankError(f"checkpoint_every is a number of seconds, 0 or more, not {checkpoint_every}.")
    options = ExecutionOptions(compile, cuda_graphs, checkpoint_activations, workers, decode)
    changes = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "quantize": quantize}
    recipe = recipe_for(data, recipe, changes)
    directory = None if out is None else RunDirectory(Path(out))
    if directory and not resume and isinstance(data, str | Path):
        directory.check_apart_from(data)
    data = open_for(model, data, recipe)
    if loss is None:
        data = for_classes(data)
        check_classes(data)
        check_network(model, data, recipe)
    extras = Extras(loss, tuple(callbacks), teacher)
    extras.check(recipe)
    fabric = launch(device, precision or recipe.precision, strategy)
    shown = Lines() if progress and fabric.is_global_zero else Progress()
    precision = precision or recipe.precision
    job = Job(fabric, model, data, recipe, seed, precision, options, directory, shown, extras)
    held = directory.held() if directory else contextlib.nullcontext()
    with held, repeatable(deterministic, processes=fabric.world_size):
        if resume and (done := job.finished()):
            return done
        for sentence in [
            *remarks(model, recipe),
            *data_remarks(data),
            *precision_remarks(precision, fabric.device),
        ]:
            shown.say(sentence)
        return _train(job, job.saved(resume=resume), log=names, checkpoint_every=checkpoint_every)


def recipe_for(data: Any, recipe: Recipe | str, fields: Mapping[str, Any]) -> Recipe:
    """The recipe with the fields that are given, None left out, and the batch size of a DataLoader."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    own = loader_batch(data[0] if isinstance(data, tuple | list) and data else data)
    if own is not None and fields.get("batch_size") not in (None, own):
        raise LowRankError(
            f"the DataLoader makes batches of {own}: leave batch_size out, or change the DataLoader."
        )
    fields = {**fields, "batch_size": own or fields.get("batch_size")}
    given = {name: value for name, value in fields.items() if value is not None}
    return changed(recipe, given) if given else recipe


def _train(job: Job, saved: Checkpoint | None, *, log: Sequence[str], checkpoint_every: float) -> Record:
    """Carry the job out, from its start or from what was saved of it."""
    fabric, model, recipe, shown = job.fabric, job.model, job.recipe, job.shown
    keep_threads(saved.state.get("conditions", {}) if saved else {})
    seed_generators(job.seed, fabric.global_rank)
    model.to(fabric.device)
    with told_out_of_memory(recipe.batch_size, fabric.device), batch_norm_over_all(fabric, model, shown.say):
        seen = input_size(job.data.test, augmentation(recipe))
        # Before images are prepared, which takes memory.
        check_memory(model, job.data, recipe, seen, fabric.device)
        inputs = job.inputs(saved)
        classes = None if job.extras.loss else len(job.data.classes)
        check_fits(model, inputs.size, classes, fabric.device, output=recipe.output)
        if recipe.whiten_first:
            whiten_first_layer(model, inputs.train, add_up=partial(sum_over_processes, fabric))
        told = [*dropout_remarks(model, recipe, inputs.size), *rounding_remarks(model, recipe, inputs.size)]
        for sentence in [*step_remarks(len(inputs.train), recipe), *told]:
            shown.say(sentence)
        in_int8 = trained_in_int8(model) if recipe.quantize == "int8" else contextlib.nullcontext({})
        image, held_out = job.data.test.size or (), held_out_part(job.about["data"])
        trained = Trained(model, inputs.preprocess, recipe, job.data.classes, image, held_out)
        carried = not isinstance(inputs.preprocess, AsGiven)
        with in_int8 as ranges, flags_restored(model):
            trainer = Trainer(
                fabric,
                model,
                job.step_builder(inputs.size, saved),
                inputs,
                recipe,
                job.record(inputs),
                directory=job.directory,
                checkpoint_every=checkpoint_every,
                objective=job.objective(inputs),
                callbacks=job.extras.callbacks,
                ranges=ranges,
            )
            if carried:
                trained.attach()
            _resume(trainer, saved, shown)
            _run(trainer, shown, log)
            note(model, int8_ranges=ranges_of(ranges))
            if carried and ranges:
                replace(trained, ranges=ranges_of(ranges)).attach()
    return trainer.record


def _resume(trainer: Trainer, checkpoint: Checkpoint | None, shown: Progress) -> None:
    """Restore the checkpoint, if any, and say which settings have changed since."""
    if checkpoint:
        changes = recipe_changes(checkpoint.state["recipe"], trainer.recipe)
        changes |= changed_conditions(checkpoint.state.get("conditions", {}), conditions(trainer.fabric))
        trainer.state.restore(checkpoint)
        position = trainer.position
        for field, (before, now) in changes.items():
            shown.say(f"From here on, {field} is {now}; it was {before}.")
            position.changes.append({"epoch": position.epoch, "field": field, "from": before, "to": now})
        shown.say(f"Going on in epoch {position.epoch + 1}, after batch {position.batch}.")
    # No process may write before all have read.
    trainer.fabric.barrier()
    if trainer.directory and trainer.fabric.is_global_zero:
        trainer.directory.begin(trainer.recipe)


def _progress(trainer: Trainer, shown: Progress, log: Sequence[str]) -> Progress:
    if isinstance(shown, Lines) and (line := moving_line()):
        total = trainer.recipe.epochs * trainer.per_epoch
        shown = line(total, trainer.per_epoch, trainer.iteration, processes=trainer.fabric.world_size)
    if not log or not trainer.fabric.is_global_zero:
        return shown
    trainer.state.update_record()
    return Logged(shown, log, trainer.record, trainer.directory.path if trainer.directory else None)


def _run(trainer: Trainer, shown: Progress, log: Sequence[str]) -> None:
    try:
        with contextlib.ExitStack() as showing:
            # Importing rich draws a random number, and loggers may: a resumed run draws what it would have drawn.
            with put_back({}, trainer.fabric.device):
                trainer.progress = showing.enter_context(_progress(trainer, shown, log))
            evaluation = trainer.run()
            trainer.record.result = _result(trainer, evaluation)
            trainer.record.right = evaluation.details.right if evaluation.details else None
            trainer.progress.result(trainer.record.result)
    except BaseException as error:
        # The reason matters more than a record that cannot be written, on a full disk say.
        with contextlib.suppress(LowRankError):
            _close(trainer, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    _close(trainer, "finished")


def _close(trainer: Trainer, status: str) -> None:
    trainer.state.update_record()
    trainer.record.status = status
    if trainer.directory and trainer.fabric.is_global_zero:
        trainer.directory.write_record(trainer.record)


def _result(trainer: Trainer, evaluation: Evaluation | LossEvaluation) -> dict[str, Any]:
    position, recipe = trainer.position, trainer.recipe
    cost = dense = None
    with contextlib.suppress(LowRankError):
        network = settle(trainer.network, trainer.inputs.size)
        cost, dense = count(network, trainer.inputs.size), dense_cost(network, trainer.inputs.size)
    seconds = sum(row["seconds"] for row in position.history)
    speeds = sorted(row["images_per_second"] for row in position.history)
    return {
        **evaluation.to_dict(),
        "details": evaluation.details.to_dict() if evaluation.details else None,
        "epochs": position.epoch,
        "best_epoch": position.best_epoch,
        "best_accuracy": max(position.best_accuracy, 0.0),
        "drop_epochs": list(recipe.drop_epochs or trainer.levels.drops),
        "macs": cost.macs if cost else None,
        "params": cost.params if cost else sum(p.numel() for p in trainer.network.parameters()),
        "dense": {"macs": dense[0], "params": dense[1]} if dense else None,
        "seconds": seconds,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
    }
