"""Errors and warnings before training starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import (
    InputSize,
    blank,
    call,
    checked_size,
    in_words,
    is_example,
)
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.data.resident import holds_bytes
from lowrank_cnn.graph.channels import why_fixed
from lowrank_cnn.graph.finalize_shapes import has_learned
from lowrank_cnn.method.select import check_values
from lowrank_cnn.models.network import Network
from lowrank_cnn.train.distributed import resolve_precision
from lowrank_cnn.train.inputs import Inputs, augmentation, input_size
from lowrank_cnn.train.recipe import Recipe, RunSettings

FEW_STEPS = 40
"""Shorter runs learn little: batch norm alone needs some thirty steps to know its statistics."""
SMALL_BATCH = 16
"""Nobody is told to make a batch smaller than this."""


def check_request(model: object, recipe: Recipe, how: RunSettings, loss: Any, teacher: object) -> None:
    """Refuse what is no network or no loss, and settings that have no effect together."""
    if not isinstance(model, nn.Module):
        hint = "give its .network" if hasattr(model, "network") else "create_model makes one from a name"
        raise LowRankError(f"fit trains an nn.Module, not a {type(model).__name__}: {hint}.")
    check_values(model)
    if recipe.quantize != "none" and (how.compile or how.checkpoint_activations):
        raise LowRankError("quantize trains layer by layer: leave compile and checkpoint_activations out.")
    if recipe.quantize != "none" and recipe.precision == "fp16":
        raise LowRankError("quantize rounds in fp32 or bf16, and fp16 rounds small steps away: set precision.")
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
    if recipe.schedule in ("cosine", "poly") and (recipe.drop_epochs or recipe.levels):
        dividing = "drop_epochs" if recipe.drop_epochs else "levels"
        yield f"The schedule {recipe.schedule} ends at zero by itself; {dividing} divides the rate on top."
    size = notes(model).input_size
    with unchanged(model):
        why = why_fixed(model, size) if has_learned(model) and size else ""
    if why:
        yield f"Filters keep their order, so that each shape gets one run of them, because {why}."
    if begun := notes(model).begun_from:
        yield f"The network begins with trained weights ({begun}); images are prepared anew, for these data."
    if "tested_on" in inputs.data.details:
        yield "There is no data set to test on, as in fit(network, (train, test)): the images trained on are used."
    precision = resolve_precision(recipe.precision, device.type)
    if device.type == "cpu" and precision in ("bf16", "fp16"):
        yield f"{precision} trains many times slower than fp32 on most CPUs (--set precision=fp32)."
    batches = len(inputs.train)
    if batches * recipe.epochs < FEW_STEPS and recipe.batch_size > SMALL_BATCH:
        each = f"{counted(batches, 'batch')} of {counted(recipe.batch_size, 'image')} in an epoch"
        told = f"This run has {counted(batches * recipe.epochs, 'step')}, {each}"
        yield f"{told}: a smaller --batch-size or more --epochs gives more."


_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def check_memory(network: nn.Module, data: Data, recipe: Recipe, device: torch.device) -> None:
    """Refuse a run that cannot fit: a process that takes too much memory is killed without a message."""
    free = free_memory(device)
    if free is None:
        return
    size = input_size(data.test, augmentation(recipe))
    splits = [split for split in (data.train, data.test) if isinstance(split, ResidentSplit)]
    images = sum(held_bytes(split, recipe, device) for split in splits)
    maps = map_bytes(network, size) * max(1, recipe.batch_size // recipe.accumulate)
    if images + maps <= free:
        return
    raise LowRankError(
        f"{in_words(size)} take about {(images + maps) / 2**30:.1f} GiB ({images / 2**30:.1f} for the set, "
        f"{maps / 2**30:.1f} for a batch of {recipe.batch_size}), and {free / 2**30:.1f} GiB are free: bring them "
        "to a smaller size (--image-size 64), use a smaller --batch-size, or --set accumulate=4."
    )


def held_bytes(split: ResidentSplit, recipe: Recipe, device: torch.device) -> int:
    """Bytes that a split takes on the device: preprocessed, or as bytes; on the CPU, as it was decoded too."""
    channels, height, width = split.size
    as_bytes = recipe.preprocess == "standardize" and holds_bytes(split, None, augmentation(recipe))
    each = (1 if as_bytes else 4) + (device.type == "cpu")
    return len(split) * channels * height * width * each


@torch.no_grad()
def map_bytes(network: nn.Module, size: InputSize) -> int:
    """Bytes of the maps of one image that the backward pass needs, measured on a smaller image and scaled up.

    Every layer's output counts once. Maps grow with the area of the image, weights do not.
    """
    total = 0

    def add(_: nn.Module, __: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor):
            total += output.numel() * 4

    several = is_example(size)
    channels, height, width = (0, 0, 0) if several else checked_size(size)
    shrink = max(1, min(height, width) // 128)
    layers = [module for module in network.modules() if not list(module.children())]
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    try:
        with contextlib.ExitStack() as hooks, unchanged(network, evaluating=True):
            for layer in layers:
                hooks.enter_context(layer.register_forward_hook(add))
            call(network, blank(size if several else (channels, height // shrink, width // shrink), device))
    except Exception:  # a network for one size: the check that follows says what is wrong, if anything
        return 0
    return total * shrink * shrink


def free_memory(device: torch.device) -> float | None:
    """Free bytes of the device, by the system and the container; None if neither is known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [value for value in (_available(), _container_limit()) if value is not None]
    return min(found) if found else None


def _available() -> float | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((float(kib) * 1024 for kib in found), None)


def _container_limit() -> float | None:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else float(limit) - float(used)
    except (OSError, ValueError):
        return None
