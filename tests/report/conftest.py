"""Records as a user's runs leave them, with figures of a realistic size, and some files that are no records."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowrank_cnn.core.files import sealed
from lowrank_cnn.method.count import Count, count
from lowrank_cnn.models import create_model
from lowrank_cnn.train.evaluate import EvaluationDetails, WrongImage

sys.path.insert(0, str(Path(__file__).parent))  # for record_examples

ENVIRONMENT = {
    "lowrank_cnn": "0.1.0",
    "commit": "1dd63ca0aa11",
    "date": "2026-01-05T12:00:00+00:00",
    "python": "3.12.3",
    "torch": "2.11.0+cu128",
    "gpu": "NVIDIA H200",
    "cpu": "Neoverse-N1",
    "cores": 16,
    "platform": "Linux aarch64",
}
ACCURACY = {
    "nin": 0.903,
    "nin-c3": 0.899,
    "nin-c3-lr": 0.891,
    "vgg11-gmp": 0.561,
    "vgg11-gmp-sf": 0.549,
    "vgg11-gmp-lr": 0.558,
    "vgg11-gmp-lr-2x": 0.566,
    "vgg11-gmp-lr-join": 0.557,
    "vgg11-gmp-lr-join-wfull": 0.577,
}


def cost(name: str, size: tuple[int, ...], classes: int) -> Count:
    with torch.device("meta"):
        return count(create_model(name, num_classes=classes), size)


def history(final: float, epochs: int, noise: random.Random) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, epochs + 1):
        risen = 1 - math.exp(-5 * epoch / epochs)
        accuracy = final * risen + noise.uniform(-0.008, 0.008) * (1 - epoch / epochs)
        row = {"epoch": epoch, "lr": 0.1, "train_loss": 2.3 * math.exp(-4 * epoch / epochs) + 0.05}
        watched = max(0.0, accuracy) if epoch % 2 == 0 or epoch == epochs else None
        rows.append({**row, "train_accuracy": min(1.0, accuracy + 0.04), "accuracy": watched, "seconds": 11.5})
    return rows


def details(classes: int, final: float, noise: random.Random) -> dict[str, Any]:
    """Answers as a run's record holds them; neighbouring classes are confused most, and confidence is too high."""
    draw = torch.Generator().manual_seed(noise.randrange(10**6))
    confusion = torch.diag(torch.full((classes,), 100.0 * final))
    rare = torch.rand(classes, classes, generator=draw) < 3 / classes
    confusion += rare * torch.rand(classes, classes, generator=draw) * 20 * (1 - final)
    confusion += torch.diag(torch.full((classes - 1,), 60 * (1 - final)), 1)
    n = torch.arange(1.0, 16) ** 2
    confidence = (torch.arange(15) + 0.5) / 15
    bins = torch.stack([n, n * confidence, n * (confidence - 0.1).clamp(min=0)], dim=1)
    names = tuple(f"class {i}" for i in range(classes))
    worst = (WrongImage("val/class 3/0007.png", "class 3", "class 4", 0.99, 7.1),)
    return EvaluationDetails(names, confusion.round().long(), bins.double(), worst).to_dict()


def training(
    name: str, data: str, size: tuple[int, ...], classes: int, seed: int, *, epochs: int = 60
) -> dict[str, Any]:
    """The record of a finished run."""
    noise = random.Random(f"{name} {data} {seed}")
    final, spent = ACCURACY[name] + noise.uniform(-0.004, 0.004), cost(name, size, classes)
    rows = history(final, epochs, noise)
    return {
        "schema": 1,
        "kind": "training",
        "model": {"name": name, "num_classes": classes, "in_channels": 3, "width": 1.0, "norm": None, "stride": 1},
        "recipe": {"name": "nin-paper" if name.startswith("nin") else "vgg-paper", "epochs": epochs},
        "data": {"name": data, "classes": [str(i) for i in range(classes)], "image": list(size)},
        "seed": seed,
        "watched": "held-out",
        "history": rows,
        "result": {
            "top1": final,
            "top5": min(0.999, final + 0.22),
            "n": 10000,
            "macs": spent.macs,
            "params": spent.params,
            "seconds": 11.5 * epochs,
            "details": details(classes, final, noise),
        },
        "status": "finished",
        "environment": ENVIRONMENT,
    }


def timing(name: str, size: tuple[int, ...], classes: int, device: str, rate: float) -> dict[str, Any]:
    """The record of a timing, at a rate in MACs per millisecond that differs from layer to layer."""
    noise, spent = random.Random(f"{name} {device}"), cost(name, size, classes)
    batch = 1 if device == "cpu" else 256
    layers = [
        {"name": layer.name, "type": "Conv2d", "macs": batch * layer.macs, "ms": batch * layer.macs / rate}
        for layer in spent.layers
    ]
    for layer in layers:
        layer["ms"] *= noise.uniform(0.7, 1.5)
    total = sum(layer["ms"] for layer in layers) * 1.1
    return {
        "kind": "timing",
        "name": name,
        "input": [batch, *size],
        "device": device,
        "macs": batch * spent.macs,
        "total": {"ms": total},
        "layers": [*layers, {"name": "pool", "type": "GlobalAveragePool", "macs": 0, "ms": 0.01}],
        "environment": ENVIRONMENT,
    }


def write(folder: Path, name: str, record: dict[str, Any]) -> Path:
    path = folder / name / "record.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sealed(record) if record["kind"] == "training" else record))
    return path


def everyday() -> Iterator[tuple[str, dict[str, Any]]]:
    for seed in (0, 1, 2):
        for name in ("nin", "nin-c3", "nin-c3-lr"):
            yield f"{name}-{seed}", training(name, "cifar10", (3, 30, 30), 10, seed)
    for name in (n for n in ACCURACY if n.startswith("vgg")):
        yield f"tiny-{name}", training(name, "tiny-imagenet-100", (3, 56, 56), 100, 0)
    for name in ("nin", "nin-c3", "nin-c3-lr"):
        yield f"time-{name}-cpu", timing(name, (3, 30, 30), 10, "cpu", 3.1e7)
        yield f"time-{name}-gpu", timing(name, (3, 30, 30), 10, "cuda", 2.2e11)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good records, and three files that are none."""
    folder = tmp_path_factory.mktemp("runs")
    for name, record in everyday():
        write(folder, name, record)
    (folder / "cut.json").write_text('{"kind": "training", "model": {"na')
    (folder / "foreign.json").write_text('{"kind": "shopping list", "items": ["milk"]}')
    (folder / "binary.json").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture(scope="session")
def text_of() -> Callable[[Path], set[str]]:
    """All words of an SVG picture."""

    def found(svg: Path) -> set[str]:
        texts = re.findall(r"<text.*?</text>", svg.read_text(encoding="utf-8"), re.DOTALL)
        return {re.sub(r"<[^>]*>", "", text).strip() for text in texts}

    return found


@pytest.fixture(scope="session")
def records(runs: Path):
    from lowrank_cnn.report import read_records

    return read_records([runs])
