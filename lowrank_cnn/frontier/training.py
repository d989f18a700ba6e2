"""One run of a design: trained by the recipe of its family, tested once, every answer kept."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Data, make_loader
from lowrank_cnn.frontier.designs import Builder, Design
from lowrank_cnn.train import fit
from lowrank_cnn.train.inputs import evaluation_batch
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.record import Record
from lowrank_cnn.train.short_runs import averaged_views
from lowrank_cnn.train.trained import carried_by


@dataclass(frozen=True)
class TrainedDesign:
    """What came of a run: its record, which test images it got right, the seconds of it all, and the network."""

    record: Record
    right: Tensor
    wall: float
    network: nn.Module


@dataclass(frozen=True)
class DesignTrainer:
    """Trains designs on one set of images, on one device, by one recipe."""

    builder: Builder
    data: Data
    recipe: Recipe
    device: str
    teacher: nn.Module | None = None
    """A trained network that all designs, thin dense ones too, learn from beside the labels."""

    def train(self, design: Design, seed: int, *, rate: float = 1.0) -> TrainedDesign:
        """Train from scratch; `rate` multiplies the learning rate of the recipe."""
        began = time.monotonic()
        torch.manual_seed(seed)
        network = self.builder(design)
        # The test set is met once, at the end.
        recipe = replace(self.recipe, lr=rate * self.recipe.lr, evaluate_every=max(1, self.recipe.epochs))
        # Too short to pay for compiling: that is not even tried.
        how = {"device": self.device, "compile": False, "progress": False, "teacher": self.teacher}
        record = fit(network, self.data, recipe, seed=seed, **how)
        right = right_answers(network, self.data, record.precision)
        outcome = TrainedDesign(record, right, time.monotonic() - began, network)
        free_memory()
        return outcome


@torch.no_grad()
def right_answers(network: nn.Module, data: Data, precision: str) -> Tensor:
    """Which test images a trained network gets right, in their order, evaluated as `fit` evaluates."""
    trained = carried_by(network)
    assert trained is not None
    device = next(network.parameters()).device
    short = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    loader = make_loader(
        data.test,
        batch_size=evaluation_batch(data.test, trained.augment),
        preprocess=trained.preprocess,
        augment=trained.augment,
        seed=0,
        device=device,
        train=False,
        dtype=short if short and device.type == "cuda" else torch.float32,
    )
    forward = averaged_views(network.eval(), trained.recipe)
    found = []
    with torch.autocast(device.type, short, enabled=short is not None):
        for images, labels in loader.epoch(0):
            found.append(forward(images).float().argmax(1) == labels)
    return torch.cat(found).cpu()


def free_memory() -> None:
    """Let go of what a run held on the device: graphs keep their memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
