"""Images per second of training on one device: this library's loop against a plain DataLoader loop.

    python -m benchmarks.train_speed --data FOLDER [--out benchmarks/results/train_speed.json]

For each network and recipe, the recipe's own step is timed eagerly, as a CUDA graph, and as a graph of compiled
kernels. The rival has the same network, batch and precision in the loop that most people write: a Dataset that
crops and mirrors image by image in worker processes, and eager steps. On a GPU the record also has the device's
share: the time of a step replayed back to back, divided by the time per step in an epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import earlier_runs, parser, rates, write_runs
from lowrank_cnn.core.environment import environment
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit, get_recipe
from lowrank_cnn.train import step as execution
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import GraphedStep

KIND = "train-speed"
WAYS = {
    "eager": {"cuda_graphs": False, "compile": False},
    "CUDA graph": {"cuda_graphs": True, "compile": False},
    "CUDA graph, compiled": {"cuda_graphs": True, "compile": True},
}


class PlainImages(Dataset):
    """Image by image, as a tutorial writes it."""

    def __init__(self, images: Tensor, labels: Tensor, crop: int, pad: int) -> None:
        self.images, self.labels, self.crop, self.pad = images, labels, crop, pad

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = nn.functional.pad(self.images[index].float() / 255, (self.pad,) * 4)
        room = image.shape[-1] - self.crop + 1
        top, left = (int(torch.randint(room, ())) for _ in range(2))
        image = image[:, top : top + self.crop, left : left + self.crop]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.labels[index]


def network(name: str, data: Data, recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    return create_model(name, num_classes=len(data.classes), in_channels=data.train.channels, **recipe.network())


def plain(name: str, data: Data, recipe: Recipe, epochs: int, workers: int) -> dict[str, object]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = network(name, data, recipe).to(device).train()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert isinstance(data.train, ResidentSplit)
    pixels = data.train.images
    images = PlainImages(pixels, data.train.labels, recipe.crop or pixels.shape[-1], recipe.pad)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": device.type == "cuda"}
    loader = DataLoader(images, recipe.batch_size, shuffle=True, drop_last=True, **options)
    optimizer = torch.optim.SGD(net.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    found = []
    for _ in range(epochs):
        began = time.perf_counter()
        for batch, labels in loader:
            plain_step(net, batch.to(device, non_blocking=True), labels.to(device, non_blocking=True), optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(len(loader) * recipe.batch_size / (time.perf_counter() - began))
    return {**rates(found[1:]), "epochs": epochs - 1}


def plain_step(net: nn.Module, images: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    images = images.contiguous(memory_format=torch.channels_last)
    optimizer.zero_grad()
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=images.is_cuda):
        loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()


def ours(name: str, data: Data, recipe: Recipe, epochs: int, **how: Any) -> dict[str, object]:
    """Rates of the epochs after the first, which captures and compiles; of a graph also the device's share."""
    with keeping_graphs() as kept:
        record = fit(network(name, data, recipe), data, recipe, epochs=epochs, progress=False, **how)
    found = [row["images_per_second"] for row in record.history[1:]]
    row: dict[str, object] = {**rates(found), "epochs": len(found)}
    if kept:
        step = replay_seconds(kept[0])
        row |= {"replay_ms": 1e3 * step, "device_share": step * median(found) / recipe.batch_size}
    return row


@contextlib.contextmanager
def keeping_graphs() -> Iterator[list[GraphedStep]]:
    """The steps that a trainer records as CUDA graphs within the block."""
    kept: list[GraphedStep] = []

    class RememberedStep(GraphedStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(self)

    with mock.patch.object(execution, "GraphedStep", RememberedStep):
        yield kept


def replay_seconds(step: GraphedStep, replays: int = 200) -> float:
    """The time of one step when steps are replayed back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(-20, replays):
        if replay == 0:
            start.record()
        step.graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / replays


def measure(name: str, data: Data, recipe: Recipe, arguments: argparse.Namespace) -> dict[str, object]:
    rows: dict[str, object] = {}
    ways = WAYS if torch.cuda.is_available() else {"eager": {}}
    for way, how in ((way, how) for way, how in ways.items() if way in arguments.ways):
        slow = way == "eager" and torch.cuda.is_available()
        rows[way] = row = ours(name, data, recipe, 2 if slow else arguments.epochs, **how)
        print(name, way, row, flush=True)
    rows["plain DataLoader loop"] = plain(name, data, recipe, 3, arguments.workers)
    print(name, "plain", rows["plain DataLoader loop"], flush=True)
    return rows


def main() -> None:
    made = parser(__doc__, "train_speed.json")
    made.add_argument("--data", required=True)
    made.add_argument("--networks", nargs="+", default=["nin-c3-lr", "nin"])
    made.add_argument("--recipes", nargs="+", default=["nin-paper", "nin-modern"])
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="Of our own.")
    made.add_argument("--epochs", type=int, default=6)
    made.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    made.add_argument("--limit", type=int, default=None)
    arguments = made.parse_args()
    data = open_data(arguments.data, limit=arguments.limit)
    recipes = {name: get_recipe(name, holdout=0, levels=0, evaluate_every=10**6) for name in arguments.recipes}
    settings = {name: recipe.to_dict() for name, recipe in recipes.items()}
    setting = {"recipes": settings, "images": len(data.train), "workers": arguments.workers}
    rows: list[dict[str, object]] = []
    run = {"setting": setting, "rows": rows, "environment": environment()}
    earlier = earlier_runs(arguments.out, KIND)
    for network_name, (recipe_name, recipe) in itertools.product(arguments.networks, recipes.items()):
        ways = measure(network_name, data, recipe, arguments)
        rows.append({"network": network_name, "recipe": recipe_name, "ways": ways})
        write_runs(arguments.out, KIND, [*earlier, run])


if __name__ == "__main__":
    main()
