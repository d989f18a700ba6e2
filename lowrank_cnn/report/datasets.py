"""What data sets are called, however a folder spells them, and whether a run had the whole of one."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from lowrank_cnn.data.readers.cifar_binary import CLASSES as CIFAR10_CLASSES
from lowrank_cnn.report.fields import items, text, whole

_NAMES = {"cifar10": "CIFAR-10", "ilsvrc12": "ILSVRC", "imagenet1k": "ILSVRC", "places205": "Places"}
_WHOLE = {"CIFAR-10": (50_000, 10_000), "ILSVRC": (1_281_167, 50_000), "Places": (2_448_873, 20_500)}
_NEARLY = 0.99
"""Of the images: a few may be damaged, and were left out."""


def data_label(name: str) -> str:
    """One name per data set, without its owner on the Hub."""
    return _NAMES.get(re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()), name)


def trained_label(data: str, recipe: str) -> str:
    """A data set and the recipe trained on it, once where both have one name (`digits`)."""
    return ", ".join(dict.fromkeys(filter(None, (data_label(data), recipe))))


def data_name(data: Mapping[str, Any]) -> str:
    """A data set is called by its folder, which may be any; CIFAR-10 is known by its classes and their images.

    A part of a known set is another: its accuracies stand beside no published ones.
    """
    name, sizes = text(data.get("name")) or "unnamed data", [whole(data.get(split)) for split in ("train", "test")]
    if tuple(items(data.get("classes"))) == CIFAR10_CLASSES and tuple(sizes) == _WHOLE["CIFAR-10"]:
        return "cifar10"
    full = _WHOLE.get(data_label(name))
    if full is None or all(size is None or size >= _NEARLY * n for size, n in zip(sizes, full, strict=True)):
        return name
    return f"a part of {data_label(name)} ({' + '.join(f'{size or 0:,}' for size in sizes)} images)"


def data_identity(data: Mapping[str, Any]) -> str:
    """What tells data apart, whatever it is called: its digest, or else its classes and numbers of images."""
    if digest := text(data.get("digest")):
        return digest
    classes = repr([str(name) for name in items(data.get("classes"))])
    known = zlib.crc32(classes.encode()), *(whole(data.get(split)) for split in ("train", "test"))
    return " ".join(map(str, known))
