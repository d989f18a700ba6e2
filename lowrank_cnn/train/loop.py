"""`fit`: train a network on a data set by a recipe, on whatever machine this is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.count import count
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.rebuild import run_entry
from lowrank_cnn.train.checkpoint import Checkpoint
from lowrank_cnn.train.directory import RunDirectory, check_same_run, recipe_changes
from lowrank_cnn.train.failure import told_out_of_memory
from lowrank_cnn.train.fused import fused_to_train
from lowrank_cnn.train.inputs import Inputs, make_inputs
from lowrank_cnn.train.launch import batch_norm_over_all, launch, resolve_precision
from lowrank_cnn.train.progress import Charts, Lines, Live, Progress
from lowrank_cnn.train.randomness import seed_generators
from lowrank_cnn.train.recipe import Recipe, changed, get_recipe
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.score import Evaluation, check_fits
from lowrank_cnn.train.trainer import Trainer

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def fit(
    model: nn.Module,
    data: Data | str | Path,
    recipe: Recipe | str = "modern",
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    epochs: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    strategy: str = "auto",
    compile: bool = False,
    cuda_graphs: bool = True,
    checkpoint_activations: bool = False,
    workers: int = 0,
    progress: bool = True,
    tensorboard: bool = False,
    checkpoint_every: float = 30.0,
) -> Record:
    """Train `model` in place and return the record of the run, its result measured on `data.test`.

    With `out`, the run lives in that directory: a checkpoint every `checkpoint_every` seconds, recipe and
    record beside it; `resume=True` goes on from there, or starts where there is nothing yet. The result is
    that of the last weights (their moving average where the recipe keeps one), never of weights chosen on
    the test set. `data` may be a `data.holdout(...)`, for a search that never sees the test set, or a name.
    `checkpoint_activations` saves memory: stages are computed again in the backward pass.
    Raises `Interrupted`, a KeyboardInterrupt, after Ctrl-C has been answered and the state saved.
    """
    if compile and checkpoint_activations:
        raise LowRankError("compile and checkpoint_activations exclude each other: torch traces no such stages.")
    recipe = _resolve(recipe, epochs)
    data = data if isinstance(data, Data) else open_data(data)
    directory = None if out is None else RunDirectory(Path(out))
    fabric = launch(device, precision or recipe.precision, strategy)
    precision = resolve_precision(precision or recipe.precision, fabric.device.type)
    shown: Progress = Lines() if progress and fabric.is_global_zero else Progress()
    about = _about(model, data, seed)
    if directory and resume and (done := directory.finished(recipe, shown.say)):
        check_same_run(vars(done), about)
        shown.say(f"The run in {directory.path} has finished: nothing is left to do.")
        return done
    checkpoint = _open(directory, resume, about, shown)
    seed_generators(seed, fabric.global_rank)
    model.to(fabric.device)
    with told_out_of_memory(recipe.batch_size, fabric.device), batch_norm_over_all(fabric, model, shown.say):
        inputs = _inputs(fabric, data, recipe, seed, workers, precision, checkpoint)
        check_fits(model, inputs.size, len(data.classes), fabric.device)
        # Launched one by one, fused layers cost the host more than they save the device: graphs alone gain.
        fused = cuda_graphs and fabric.world_size == 1 and not compile
        placed = _place(fabric, model, recipe, inputs.size, fused=fused, say=shown.say)
        placed = recomputed(placed).train() if checkpoint_activations else placed
        forward = fabric.setup_module(torch.compile(placed) if compile else placed)  # type: ignore[arg-type]
        record = _record(fabric, about, recipe, precision, inputs)
        trainer = Trainer(
            fabric,
            model,
            forward,
            inputs,
            recipe,
            record,
            directory=directory,
            cuda_graphs=cuda_graphs,
            checkpoint_every=checkpoint_every,
        )
        _resume(trainer, checkpoint, shown)
        _run(trainer, _progress(trainer, shown, tensorboard))
    return record


def _resolve(recipe: Recipe | str, epochs: int | None) -> Recipe:
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    return recipe if epochs is None else changed(recipe, {"epochs": epochs})


def _about(model: nn.Module, data: Data, seed: int) -> dict[str, Any]:
    """What makes a run that run: its network, its data and its seed."""
    return {
        "model": run_entry(model),
        "data": {
            "name": data.name,
            "classes": list(data.classes),
            "train": len(data.train),
            "test": len(data.test),
            "image": list(data.test.size or ()),
        },
        "seed": seed,
    }


def _open(
    directory: RunDirectory | None, resume: bool, about: dict[str, Any], shown: Progress
) -> Checkpoint | None:
    """The checkpoint to go on from, if any; a directory that holds a run is only touched to go on with it."""
    if directory is None:
        if resume:
            raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
        return None
    if not resume:
        directory.check_free()
        return None
    checkpoint = directory.resume(shown.say)
    if checkpoint:
        check_same_run(checkpoint.state, about)
    else:
        shown.say(f"There is nothing to resume in {directory.path} yet: the run starts anew.")
    return checkpoint


def _place(
    fabric: Fabric,
    model: nn.Module,
    recipe: Recipe,
    size: tuple[int, int, int],
    *,
    fused: bool,
    say: Callable[[str], None],
) -> nn.Module:
    """Lay the model out as the device likes it, its layers fused where that can be."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = recipe.dropout
    if fabric.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        model = fused_to_train(model, size, say) if fused else model
    return model


def _inputs(
    fabric: Fabric,
    data: Data,
    recipe: Recipe,
    seed: int,
    workers: int,
    precision: str,
    checkpoint: Checkpoint | None,
) -> Inputs:
    return make_inputs(
        data,
        recipe,
        seed=seed,
        device=fabric.device,
        rank=fabric.global_rank,
        world=fabric.world_size,
        workers=workers,
        # The first conv would round its images to bf16 anyway; on a GPU it then reads half the bytes.
        dtype=torch.bfloat16 if precision == "bf16" and fabric.device.type == "cuda" else torch.float32,
        saved=checkpoint.part("preprocess") if checkpoint else None,
    )


def _record(fabric: Fabric, about: dict[str, Any], recipe: Recipe, precision: str, inputs: Inputs) -> Record:
    return Record(
        **about,
        recipe=recipe.to_dict(),
        watched=inputs.watched,
        precision=precision,
        device=str(fabric.device),
        processes=fabric.world_size,
    )


def _resume(trainer: Trainer, checkpoint: Checkpoint | None, shown: Progress) -> None:
    """Stand where the checkpoint says, and say which parts of the recipe are new from here on."""
    if checkpoint:
        changes = recipe_changes(checkpoint.state["recipe"], trainer.recipe)
        trainer.restore(checkpoint)
        position = trainer.position
        for field, (before, now) in changes.items():
            shown.say(f"From here on, {field} is {now}; it was {before}.")
            position.changes.append({"epoch": position.epoch, "field": field, "from": before, "to": now})
        shown.say(f"Going on in epoch {position.epoch + 1}, after batch {position.batch}.")
    # No process may write before all have read.
    trainer.fabric.barrier()
    if trainer.directory and trainer.fabric.is_global_zero:
        trainer.directory.begin(trainer.recipe)


def _progress(trainer: Trainer, shown: Progress, tensorboard: bool) -> Progress:
    if isinstance(shown, Lines) and sys.stdout.isatty():
        total = trainer.recipe.epochs * trainer.per_epoch
        shown = Live(total, trainer.per_epoch, trainer.iteration, processes=trainer.fabric.world_size)
    if not tensorboard or not trainer.fabric.is_global_zero:
        return shown
    if trainer.directory is None:
        raise LowRankError("TensorBoard scalars are written beside the run: give --out.")
    return Charts(shown, trainer.directory.path / "tensorboard", trainer.position.epoch)


def _run(trainer: Trainer, progress: Progress) -> None:
    trainer.progress = progress
    try:
        with trainer.progress:
            evaluation = trainer.run()
    except BaseException as error:
        # The reason matters more than a record that cannot be written, on a full disk say.
        with contextlib.suppress(LowRankError):
            _close(trainer, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    trainer.record.result = _result(trainer, evaluation)
    _close(trainer, "finished")


def _close(trainer: Trainer, status: str) -> None:
    trainer.update_record()
    trainer.record.status = status
    if trainer.directory and trainer.fabric.is_global_zero:
        trainer.directory.write_record(trainer.record)


def _result(trainer: Trainer, evaluation: Evaluation) -> dict[str, Any]:
    position, recipe = trainer.position, trainer.recipe
    cost = None
    with contextlib.suppress(LowRankError):
        cost = count(trainer.network, trainer.inputs.size)
    seconds = sum(row["seconds"] for row in position.history)
    speeds = sorted(row["images_per_second"] for row in position.history)
    return {
        **evaluation.to_dict(),
        "epochs": position.epoch,
        "best_epoch": position.best_epoch,
        "best_accuracy": max(position.best_accuracy, 0.0),
        "drop_epochs": list(recipe.drop_epochs or trainer.levels.drops),
        "macs": cost.macs if cost else None,
        "params": cost.params if cost else sum(p.numel() for p in trainer.network.parameters()),
        "seconds": seconds,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
    }
