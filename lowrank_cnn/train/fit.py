"""`fit`: train a network on a data set by a recipe, on whatever machine this is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import InputSize, checked_size, is_example
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.data import Data
from lowrank_cnn.data.own import for_classes, loader_batch
from lowrank_cnn.data.preprocess import AsGiven
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
    keep_threads,
    launch,
    repeatable,
    resolve_precision,
    seed_generators,
    sum_over_processes,
)
from lowrank_cnn.train.failure import lost_process_as_user_error, oom_as_user_error
from lowrank_cnn.train.inputs import Inputs, augmentation, check_network, input_size, make_inputs, open_for
from lowrank_cnn.train.int8 import ranges_of, trained_in_int8
from lowrank_cnn.train.loop import Callback, Trainer
from lowrank_cnn.train.objective import Loss, Objective, class_balance
from lowrank_cnn.train.optimizers import flags_restored, in_evaluation
from lowrank_cnn.train.progress import Lines, Logged, Progress, check_loggers, moving_line
from lowrank_cnn.train.recipe import Recipe, changed
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.run_folder import RunDirectory
from lowrank_cnn.train.score import Evaluation, LossEvaluation, check_classes, check_fits
from lowrank_cnn.train.short_runs import whiten_first_layer
from lowrank_cnn.train.step import COMPILED, EAGER, Compile, StepBuilder, fused_to_train, put_back, resolved
from lowrank_cnn.train.trained import Trained, held_out_part, make_teacher

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    loggers = ((log,) if isinstance(log, str) else tuple(log)) + (("tensorboard",) if tensorboard else ())
    check_loggers(loggers)
    if not checkpoint_every >= 0:  # a NaN is refused too
        raise LowRankError(f"checkpoint_every is a number of seconds, 0 or more, not {checkpoint_every}.")
    if compile not in (True, False, "auto"):
        raise LowRankError(f'compile is True, False or "auto", not {compile!r}.')
    if compile is True and checkpoint_activations:
        raise LowRankError("compile and checkpoint_activations exclude each other: torch traces no such stages.")
    recipe = recipe_for(data, recipe, {"epochs": epochs, "batch_size": batch_size, "lr": lr, "quantize": quantize})
    if loss is not None:
        _check_loss(loss, teacher, recipe)
    if out is None and resume:
        raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
    directory = None if out is None else RunDirectory(Path(out))
    if directory and not resume and isinstance(data, str | Path):
        directory.check_apart_from(data)
    data = open_for(model, data, recipe)
    if loss is None:
        data = for_classes(data)
        check_classes(data)
        check_network(model, data, recipe)
    fabric = launch(device, precision or recipe.precision, strategy)
    precision = resolve_precision(precision or recipe.precision, fabric.device.type)
    if recipe.quantize != "none":
        by_layers = compile is not True and not checkpoint_activations
        _check_quantize(precision, fabric.world_size, by_layers=by_layers)
    shown = Lines() if progress and fabric.is_global_zero else Progress()
    identity = about(model, data, seed)  # now: later the layers of the model are replaced by faster ones
    held = directory.held() if directory else contextlib.nullcontext()
    with held, repeatable(deterministic, processes=fabric.world_size):
        if directory and resume and (done := directory.finished(recipe, identity, shown.say)):
            return done
        for sentence in [
            *remarks(model, recipe),
            *data_remarks(data),
            *precision_remarks(precision, fabric.device),
        ]:
            shown.say(sentence)
        saved = None
        if directory and resume:
            saved = directory.resume(data, identity, shown.say)
        elif directory:
            directory.check_free()
        keep_threads(saved.state.get("conditions", {}) if saved else {})
        seed_generators(seed, fabric.global_rank)
        model.to(fabric.device)
        with oom_as_user_error(recipe.batch_size, fabric.device), batch_norm_over_all(fabric, model, shown.say):
            size = input_size(data.test, augmentation(recipe))
            # Before images are prepared, which takes memory.
            check_memory(model, data, recipe, size, fabric.device)
            half = _HALVES.get(precision) if fabric.device.type == "cuda" else None
            inputs = make_inputs(
                data,
                recipe,
                seed=seed,
                device=fabric.device,
                rank=fabric.global_rank,
                world=fabric.world_size,
                workers=workers,
                decode=decode,
                # The first conv would round its images to bf16 anyway; on a GPU it then reads half the bytes.
                dtype=half or torch.float32,
                saved=saved.part("preprocess") if saved else None,
            )
            check_fits(model, size, None if loss else len(data.classes), fabric.device, output=recipe.output)
            if recipe.whiten_first:
                whiten_first_layer(model, inputs.train, add_up=partial(sum_over_processes, fabric))
            for sentence in [
                *step_remarks(len(inputs.train), recipe),
                *dropout_remarks(model, recipe, size),
                *rounding_remarks(model, recipe, size),
            ]:
                shown.say(sentence)
            in_int8 = trained_in_int8(model) if recipe.quantize == "int8" else contextlib.nullcontext({})
            with in_int8 as ranges, flags_restored(model):
                on_one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
                graphs = cuda_graphs and on_one_gpu and loss is None and not is_example(size)
                running = laid_out(
                    model,
                    recipe,
                    size,
                    fabric.device,
                    graphs=graphs,
                    recompute=checkpoint_activations,
                    say=shown.say,
                )
                if checkpoint_activations and running is model:
                    running = recomputed(running).train()
                compile = resolved(
                    compile,
                    # What is faster is decided by times, which differ from run to run: not where bits must repeat.
                    able=graphs
                    and recipe.quantize == "none"
                    and not checkpoint_activations
                    and not torch.are_deterministic_algorithms_enabled(),
                    before=saved.state.get("execution", {}) if saved else {},
                )
                trainer = Trainer(
                    fabric,
                    model,
                    StepBuilder(_forwards(fabric, running, compile), graphs, shown.say),
                    inputs,
                    recipe,
                    Record(
                        **identity | {"data": identity["data"] | ({"decode": decode} if decode != "cpu" else {})},
                        recipe=recipe.to_dict(),
                        watched=inputs.watched,
                        precision=precision,
                        device=str(fabric.device),
                        processes=fabric.world_size,
                        begun_from=notes(model).begun_from,
                    ),
                    directory=directory,
                    checkpoint_every=checkpoint_every,
                    objective=_objective(fabric, inputs, recipe, loss, teacher),
                    callbacks=tuple(callbacks),
                    ranges=ranges,
                )
                carried = not isinstance(inputs.preprocess, AsGiven)
                image, held_out = data.test.size or (), held_out_part(identity["data"])
                trained = Trained(model, inputs.preprocess, recipe, data.classes, image, held_out)
                if carried:
                    trained.attach()
                if saved:
                    trainer.restore(saved, shown.say)
                fabric.barrier()  # no process may write before all have read
                if directory and fabric.is_global_zero:
                    directory.begin(recipe)
                _run(trainer, shown, loggers)
                note(model, int8_ranges=ranges_of(ranges))
                if carried and ranges:
                    replace(trained, ranges=ranges_of(ranges)).attach()
        return trainer.record


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


def _check_loss(loss: Loss, teacher: object, recipe: Recipe) -> None:
    """Refuse settings that have no effect with a loss of the user's own."""
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


def _check_quantize(precision: str, processes: int, *, by_layers: bool) -> None:
    if not by_layers:
        raise LowRankError("quantize trains layer by layer: leave compile and checkpoint_activations out.")
    if processes > 1:
        raise LowRankError("quantize trains in one process: start it without torchrun, on one device.")
    if precision == "fp16":
        raise LowRankError("quantize rounds in fp32 or bf16, and fp16 rounds small steps away: set precision.")


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


def laid_out(
    model: nn.Module,
    recipe: Recipe,
    size: InputSize,
    device: torch.device,
    *,
    graphs: bool,
    recompute: bool,
    say: Callable[[str], None],
) -> nn.Module:
    """The model in channels_last, with its layers fused where that is possible and faster."""
    in_channels_last(model)
    if recipe.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = recipe.dropout
    if device.type != "cuda":
        return model
    running = model
    # What is fused, and which algorithm cuDNN takes, is decided by times, which differ from run to run.
    repeatable = torch.are_deterministic_algorithms_enabled()
    # A fused batch norm cannot be frozen, and a fused layer does not round.
    apart = recipe.freeze or in_evaluation(model) or recipe.quantize != "none"
    # Launched one by one, fused layers cost the host more than they save the device: graphs alone gain.
    if graphs and not repeatable and not apart:
        running = fused_to_train(model, checked_size(size), say, recompute=recompute)
    torch.backends.cudnn.benchmark = not repeatable  # not before: a few images need no search
    return running


def _forwards(fabric: Fabric, running: nn.Module, compile: Compile) -> dict[str, nn.Module]:
    """The ways to run the network in training, of which `StepBuilder` chooses one."""
    forwards: dict[str, nn.Module] = {}
    if compile is not True:
        forwards[EAGER] = fabric.setup_module(running)
    if compile:
        # Dropout draws the same numbers as without the compiler, so that results are the same.
        compiled: Any = torch.compile(running, dynamic=False, options={"fallback_random": True})
        # Fabric would take the compiler off and put it on again around its own wrapper.
        forwards[COMPILED] = fabric.setup_module(compiled, _reapply_compile=False)
    return forwards


def _objective(
    fabric: Fabric,
    inputs: Inputs,
    recipe: Recipe,
    loss: Loss | None,
    teacher: nn.Module | Trained | str | Path | None,
) -> Objective:
    """The loss that the run minimises."""
    weights = answers = None
    if recipe.class_weights == "balanced":
        weights = class_balance(inputs.data.train, len(inputs.data.classes)).to(fabric.device)
    if teacher is not None:
        if is_example(inputs.size):
            raise LowRankError("a teacher takes one image, and this network has several inputs: leave it out.")
        size = checked_size(inputs.size)
        answers = make_teacher(teacher, inputs.data, inputs.preprocess, fabric.device, fabric.autocast, size)
    return Objective(recipe, class_weights=weights, loss=loss, teacher=answers)


def _run(trainer: Trainer, shown: Progress, loggers: Sequence[str]) -> None:
    """Train to the end and test, shown and logged; the record says how the run ended."""
    directory, first = trainer.directory, trainer.fabric.is_global_zero
    try:
        with contextlib.ExitStack() as showing:
            # Importing rich draws a random number, and loggers may: a resumed run draws what it would have drawn.
            with put_back({}, trainer.fabric.device):
                if isinstance(shown, Lines) and (line := moving_line()):
                    total = trainer.recipe.epochs * trainer.per_epoch
                    processes = trainer.fabric.world_size
                    shown = line(total, trainer.per_epoch, trainer.iteration, processes=processes)
                if loggers and first:
                    trainer.update_record()
                    shown = Logged(shown, loggers, trainer.record, directory.path if directory else None)
                trainer.progress = showing.enter_context(shown)
            evaluation = trainer.run()
            trainer.record.result = _result(trainer, evaluation)
            trainer.record.right = evaluation.details.right if evaluation.details else None
            trainer.progress.result(trainer.record.result)
    except BaseException as error:
        # The reason matters more than a record that cannot be written, on a full disk say.
        with contextlib.suppress(LowRankError):
            trainer.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    trainer.close("finished")


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
