"""Estimate the memory of a run before it starts: a process that takes too much is killed without a message."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.data.resident import holds_bytes
from lowrank_cnn.method.inputs import InputSize, blank, call, checked_size, in_words, is_example
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.inputs import augmentation
from lowrank_cnn.train.recipe import Recipe

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def check_memory(network: nn.Module, data: Data, recipe: Recipe, size: InputSize, device: torch.device) -> None:
    """Refuse a run that cannot fit, with the size of its images and what would make it fit."""
    free = free_memory(device)
    if free is None:
        return
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
    hooks = [layer.register_forward_hook(add) for layer in layers]
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    try:
        with unchanged(network, evaluating=True):
            call(network, blank(size if several else (channels, height // shrink, width // shrink), device))
    except Exception:  # a network for one size: the check that follows says what is wrong, if anything
        return 0
    finally:
        for hook in hooks:
            hook.remove()
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
