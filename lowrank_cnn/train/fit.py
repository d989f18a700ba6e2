"""`fit`: train a network on a data set by a recipe, on whatever machine this is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, nearest, option, setting
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.data.own import for_classes, loader_batch
from lowrank_cnn.data.preprocess import AsGiven
from lowrank_cnn.graph.finalize_shapes import finalize_shapes
from lowrank_cnn.method.branches import helped
from lowrank_cnn.method.count import count
from lowrank_cnn.method.select import check_values
from lowrank_cnn.models.build import dense_cost, run_entry
from lowrank_cnn.models.network import Network
from lowrank_cnn.train.distributed import (
    batch_norm_over_all,
    launch,
    repeatable,
    resolve_precision,
    seed_generators,
    sum_over_processes,
)
from lowrank_cnn.train.evaluate import Evaluation, LossEvaluation
from lowrank_cnn.train.failure import lost_process_as_user_error, oom_as_user_error
from lowrank_cnn.train.inputs import (
    Inputs,
    check_classes,
    check_fits,
    check_network,
    make_inputs,
    open_for,
    trained_on,
    whiten_first_layer,
)
from lowrank_cnn.train.int8 import range_states, ranges_of, trained_in_int8
from lowrank_cnn.train.loop import Callback, Trainer
from lowrank_cnn.train.objective import Loss, Objective, balanced_weights
from lowrank_cnn.train.optimizers import flags_restored
from lowrank_cnn.train.progress import Progress, check_loggers, showing
from lowrank_cnn.train.recipe import Recipe, RunSettings, changed
from lowrank_cnn.train.recipes import defaults_in_words, get_recipe, suited
from lowrank_cnn.train.run_folder import Record, RunDirectory
from lowrank_cnn.train.trained import Teacher, Trained, held_out_part, make_teacher

FEW_STEPS = 40
"""Shorter runs learn little: batch norm alone needs some thirty steps to know its statistics."""
SMALL_BATCH = 16
"""Nobody is told to make a batch smaller than this."""
_REPLACED = {
    "learning_rate": "lr sets the learning rate",
    "strategy": "processes that torchrun starts train together without it",
    "tensorboard": 'log="tensorboard" does the same',
}
"""Words that `fit` does not take, and what to use instead."""
_NAMES = ("loss", "callbacks", "teacher", "seed", "out", "resume", "device", "log", "progress")


@lost_process_as_user_error()
def fit(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str | None = None,
    *,
    loss: Loss | None = None,
    callbacks: Sequence[Callback] = (),
    teacher: Teacher | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    device: str = "auto",
    log: str | Sequence[str] = (),
    progress: bool = True,
    **settings: Any,
) -> Record:
    """Train `model` in place and return the record of the run, its result measured on the test images.

    >>> record = fit(network, "photos", epochs=10, out="runs/photos")  # doctest: +SKIP
    >>> record.result["top1"]  # doctest: +SKIP
    0.925

    What is trained:

    - `data`: what `open_data` gives, or a path that it takes; or a Dataset or DataLoader of your own whose items
      are (image, target), or a pair of them to train and test on. Your own data is taken as it is: the recipe's
      preprocessing and crops are not applied. A DataLoader's batch size replaces the recipe's. An item may
      hold a volume [C, D, H, W] instead of an image (standardized if it is uint8), or for a network with several
      inputs a tuple or a dictionary of tensors. A pair (inputs, targets) of tensors or arrays is taken too.
      `data` may be a `data.holdout(...)`, for a search that never sees the test set.
    - `loss`: a function of the outputs and targets of a batch in place of cross-entropy, for any other task.
    - `teacher`: a trained network whose answers count beside the labels (`distill_weight` of the recipe).

    How it is trained:

    - `recipe`: a name or a `Recipe`, used as it is. Without one, the number of training images chooses batch size,
      epochs and learning rate for the recipe `modern` (`defaults_for`), and a line says which. Networks with layer
      norms and no batch norms are trained by AdamW.
    - `epochs`, `batch_size`, `lr`: the fields of the recipe that are changed most.
    - `settings`: any other field of the recipe (`momentum=0.8`, `precision="bf16"`, `quantize="int8"`), and rare
      settings of the run (`compile=False`, `workers=8`, `deterministic=True`): `RunSettings` lists them.
    - `seed`: of the order of the data, augmentation and dropout.
    - `device`: "cpu", "cuda", "cuda:1" or "mps"; "auto" takes a GPU if there is one.

    Where it is kept and shown:

    - `out`: the directory of the run, for checkpoints, recipe and record; `resume=True` goes on from there, or
      starts a run if there is none yet. One process at a time can use it.
    - `log`: where the figures of every epoch are sent: "tensorboard", "csv", "wandb", or several of them.
    - `callbacks`: functions called after each epoch with its figures and the network; True ends the run.
    - `progress`: show a moving line, or the epochs.

    `quantize="int8"` trains with rounded inputs and weights, for a network that loses accuracy when `lr.quantize`
    rounds it after training. Start from trained weights, with a low rate. The result is that of the rounded
    network; its weights stay in float, and `lr.quantize` writes them with the ranges found here.
    The result is that of the last weights (their moving average if the recipe keeps one), never of weights chosen
    on the test set.
    Raises `Interrupted`, a KeyboardInterrupt, after Ctrl-C has been answered and the state saved.
    """
    loggers = (log,) if isinstance(log, str) else tuple(log)
    check_loggers(loggers)
    directory, chosen = RunDirectory.open(out, data, resume=resume), recipe is None
    settings |= {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    data, recipe, how = open_with_recipe(model, data, recipe, settings, loss=loss, teacher=teacher)
    fabric = launch(device, recipe.precision)
    show = Progress(progress and fabric.is_global_zero)
    if chosen:
        show.say(defaults_in_words(recipe, trained_on(data, recipe)))
    identity = about(model, data, seed)  # now: later the layers of the model are replaced by faster ones
    with contextlib.ExitStack() as run:
        run.enter_context(oom_as_user_error(recipe.batch_size, fabric.device))
        if directory:
            run.enter_context(directory.held())
        run.enter_context(repeatable(how.deterministic, processes=fabric.world_size))
        if directory and not resume:
            directory.check_free()
        saved = directory.resume(data, recipe, identity, show.say) if directory and resume else None
        if isinstance(saved, Record):  # nothing is left to do
            return saved
        if saved and how.deterministic:  # as many threads as before, even on another machine
            torch.set_num_threads(saved.state["conditions"]["threads"])
        seed_generators(seed, fabric.global_rank)
        model.to(fabric.device)
        run.enter_context(batch_norm_over_all(fabric, model, show.say))
        inputs = make_inputs(fabric, data, recipe, how, seed=seed, saved=saved and saved.part("preprocess"))
        check_fits(model, inputs.size, None if loss else len(data.classes), fabric.device, recipe.output)
        if recipe.whiten_first:
            whiten_first_layer(model, inputs.train, add_up=partial(sum_over_processes, fabric))
        for sentence in remarks(model, recipe, inputs, fabric.device):
            show.say(sentence)
        run.enter_context(trained_in_int8(model, recipe, processes=fabric.world_size))
        run.enter_context(flags_restored(model))
        helpers = run.enter_context(helped(model, recipe.helper))
        weights = answers = None
        if recipe.class_weights == "balanced":
            weights = balanced_weights(data.train, len(data.classes)).to(fabric.device)
        if teacher is not None:
            answers = make_teacher(teacher, inputs, fabric.device, fabric.autocast)
        record = Record(
            **identity,
            recipe=recipe.to_dict(),
            watched="holdout" if recipe.holdout else "test",
            precision=resolve_precision(recipe.precision, fabric.device.type),
            device=str(fabric.device),
            processes=fabric.world_size,
            begun_from=notes(model).begun_from,
            execution=saved.state["execution"] if saved else {},
        )
        trainer = Trainer(
            fabric,
            model,
            inputs,
            recipe,
            how,
            record,
            objective=Objective(recipe, class_weights=weights, loss=loss, teacher=answers),
            directory=directory,
            helpers=helpers,
            callbacks=tuple(callbacks),
            progress=show,
        )
        if saved:
            trainer.restore(saved)
        _attach(model, inputs, recipe, identity)
        fabric.barrier()  # no process may write before all have read
        if directory and fabric.is_global_zero:
            directory.begin(recipe)
        _run(trainer, loggers)
        _attach(model, inputs, recipe, identity)
    return record


def open_with_recipe(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str | None,
    settings: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    teacher: Teacher | None = None,
) -> tuple[Data, Recipe, RunSettings]:
    """The images of a run and its recipe, which their number determines if none is named; both are checked."""
    fields, how = sorted_settings(settings)
    asked = "modern" if recipe is None else recipe
    found = recipe_for(data, asked, fields)
    check_request(model, found, how, loss, teacher)
    opened = open_for(model, data, found)
    if loss is None:
        opened = for_classes(opened)
        check_classes(opened)
        check_network(model, opened, found)
    if recipe is None:  # last: counting images may decode them
        found = recipe_for(data, asked, fields, images=trained_on(opened, found), network=model)
    return opened, found, how


def recipe_for(
    data: Any,
    recipe: Recipe | str,
    fields: Mapping[str, Any],
    *,
    images: int = 0,
    network: nn.Module | None = None,
) -> Recipe:
    """The recipe with the fields that are given, None left out, and the batch size of a DataLoader.

    With a `network` to train on a number of `images`, other fields get the defaults for these.
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    own = loader_batch(data[0] if isinstance(data, tuple | list) and data else data)
    if own is not None and fields.get("batch_size") not in (None, own):
        raise LowRankError(f"the DataLoader makes batches of {own}: leave batch_size out, or change the loader.")
    fields = {**fields, "batch_size": own or fields.get("batch_size")}
    given = {name: value for name, value in fields.items() if value is not None}
    found = changed(recipe, given)
    return found if network is None else suited(found, images, network, given)


def sorted_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], RunSettings]:
    """Fields of the recipe, and settings of the run; unknown words are refused."""
    ours, fields = ({field.name for field in dataclasses.fields(kind)} for kind in (RunSettings, Recipe))
    for name in given:
        if name in _REPLACED:
            raise LowRankError(f"fit takes no {name}: {_REPLACED[name]}.")
        if name not in ours | fields:
            raise LowRankError(f"fit takes no {name}: {nearest(name, {*ours, *fields, *_NAMES})}")
    how = {name: value for name, value in given.items() if name in ours and value is not None}
    return {name: value for name, value in given.items() if name in fields}, changed(RunSettings(), how)


def check_request(model: object, recipe: Recipe, how: RunSettings, loss: Any, teacher: object) -> None:
    """Refuse what is no network or no loss, and settings that have no effect together."""
    if not isinstance(model, nn.Module):
        hint = "give its .network" if hasattr(model, "network") else "create_model makes one from a name"
        raise LowRankError(f"fit trains an nn.Module, not a {type(model).__name__}: {hint}.")
    check_values(model)
    if recipe.quantize != "none" and how.compile:
        raise LowRankError("quantize trains layer by layer: leave compile out.")
    if recipe.quantize != "none" and recipe.precision == "fp16":
        raise LowRankError("quantize rounds in fp32 or bf16, and fp16 rounds small steps away: set precision.")
    if recipe.helper and (how.compile or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        raise LowRankError("helper trains in one process, layer by layer: leave compile and torchrun out.")
    if loss is None:
        return
    if not callable(loss):
        raise LowRankError(f"a loss is a function of outputs and targets, not {loss!r:.60}.")
    learned = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if name := next((name for name, parameter in learned if parameter.requires_grad), ""):
        raise LowRankError(
            f"the loss has parameters ({name}), and fit trains those of the network: make them a part of the "
            "network, or freeze them by loss.requires_grad_(False)."
        )
    if teacher is not None:
        raise LowRankError("a loss of your own takes the place of the teacher's: ask the teacher within it.")
    if recipe.class_weights != "none":
        raise LowRankError("a loss of your own weighs classes itself: set class_weights=none.")


def remarks(model: nn.Module, recipe: Recipe, inputs: Inputs, device: torch.device) -> Iterator[str]:
    """Warnings about a network, a recipe and images that do not fit each other; the run starts all the same."""
    has = model.config if isinstance(model, Network) else recipe.network()
    for name, wanted in recipe.network().items():
        if wanted is not None and has.get(name) != wanted:
            ours = f"{name}={has.get(name)!r}"
            yield f"The recipe {recipe.name} is for networks with {name}={wanted!r}; this one has {ours}."
    if recipe.drop_epochs and recipe.epochs <= max(recipe.drop_epochs):
        drops = " and ".join(map(str, recipe.drop_epochs))
        yield f"The learning rate is divided after {drops} epochs; this run has {recipe.epochs}."
    if begun := notes(model).begun_from:
        yield f"The network begins with trained weights ({begun}); images are prepared anew, for these data."
    if "tested_on" in inputs.data.details:
        yield "There is no data set to test on, as in fit(network, (train, test)): the images trained on are used."
    precision = resolve_precision(recipe.precision, device.type)
    if device.type == "cpu" and precision in ("bf16", "fp16"):
        yield f"{precision} trains many times slower than fp32 on most CPUs ({setting('precision', 'fp32')})."
    batches = len(inputs.train)
    if batches * recipe.epochs < FEW_STEPS and recipe.batch_size > SMALL_BATCH:
        each = f"{counted(batches, 'batch')} of {counted(recipe.batch_size, 'image')} in an epoch"
        told = f"This run has {counted(batches * recipe.epochs, 'step')}, {each}"
        yield f"{told}: a smaller {option('batch_size')} or more {option('epochs')} gives more."


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


def _attach(model: nn.Module, inputs: Inputs, recipe: Recipe, identity: Mapping[str, Any]) -> None:
    """Let the network carry its classes, the preparation of its images and its ranges of int8."""
    found = ranges_of(range_states(model))
    note(model, int8_ranges=found)
    if not isinstance(inputs.preprocess, AsGiven):
        image, held_out = inputs.data.test.size or (), held_out_part(identity["data"])
        Trained(model, inputs.preprocess, recipe, inputs.data.classes, image, held_out, found).attach()


def _run(trainer: Trainer, loggers: Sequence[str]) -> None:
    """Train to the end and test, shown and logged; the record says how the run ended."""
    record = trainer.record
    try:
        with showing(trainer, loggers):
            evaluation = trainer.run()
            record.result = _result(trainer, evaluation)
            record.right = evaluation.details.right if evaluation.details else None
            trainer.progress.result(record.result)
    except BaseException as error:
        # The reason matters more than a record that cannot be written, on a full disk say.
        with contextlib.suppress(LowRankError):
            trainer.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    trainer.close("finished")


def _result(trainer: Trainer, evaluation: Evaluation | LossEvaluation) -> dict[str, Any]:
    position, size = trainer.position, trainer.inputs.size
    cost = dense = None
    with contextlib.suppress(LowRankError):
        network = finalize_shapes(trainer.network, size)
        cost, dense = count(network, size), dense_cost(network, size)
    seconds = sum(row["seconds"] for row in position.history)
    speeds = sorted(row["images_per_second"] for row in position.history)
    return {
        **evaluation.to_dict(),
        "details": evaluation.details.to_dict() if evaluation.details else None,
        "epochs": position.epoch,
        "best_epoch": position.best_epoch,
        "best_accuracy": max(position.best_accuracy, 0.0),
        "drop_epochs": list(trainer.recipe.drop_epochs or trainer.levels.drops),
        "macs": cost.macs if cost else None,
        "params": cost.params if cost else sum(p.numel() for p in trainer.network.parameters()),
        "dense": {"macs": dense[0], "params": dense[1]} if dense else None,
        "seconds": seconds,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
    }
