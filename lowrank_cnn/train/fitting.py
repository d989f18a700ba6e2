"""`fit`: train a network on a data set by a recipe, on whatever machine this is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.data.dataset import AsGiven
from lowrank_cnn.data.own_data import for_classes, loader_batch
from lowrank_cnn.data.types import Decode
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.selection import check_values
from lowrank_cnn.method.settling import settle
from lowrank_cnn.models.twins import dense_cost
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.determinism import changed_conditions, conditions, keep_threads, repeatable, seed_generators
from lowrank_cnn.train.directory import RunDirectory, recipe_changes
from lowrank_cnn.train.execution import Compile
from lowrank_cnn.train.fabric import batch_norm_over_all, launch, sum_over_processes
from lowrank_cnn.train.failure import lost_process_as_user_error, told_out_of_memory
from lowrank_cnn.train.fake_int8 import ranges_of, trained_in_int8
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.job import ExecutionOptions, Extras, Job
from lowrank_cnn.train.loggers import Logged, check_loggers
from lowrank_cnn.train.memory_check import check_memory
from lowrank_cnn.train.objective import Loss
from lowrank_cnn.train.opening import check_network, open_for
from lowrank_cnn.train.optimizers import flags_restored
from lowrank_cnn.train.progress import Lines, Progress, moving_line
from lowrank_cnn.train.recipe import Recipe, changed
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.remarks import (
    data_remarks,
    dropout_remarks,
    precision_remarks,
    remarks,
    rounding_remarks,
    step_remarks,
)
from lowrank_cnn.train.score import Evaluation, LossEvaluation, check_classes, check_fits
from lowrank_cnn.train.short_runs import whiten_first_layer
from lowrank_cnn.train.step import put_back
from lowrank_cnn.train.trained import Trained, held_out_part
from lowrank_cnn.train.trainer import Callback, Trainer


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
