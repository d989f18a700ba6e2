"""Learning rates as pure functions of the iteration, and the rule that divides them by ten.

The authors divided the learning rate by hand each time validation accuracy levelled off; `LevelOff` does it
for them. It is fed the accuracy on held-out training images, never on the test set.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lowrank_cnn.train.recipe import Recipe

Verdict = Literal["go", "drop", "stop"]
_STATE = ("best", "waited", "gained", "drops")


def warmup_epochs(recipe: Recipe) -> float:
    """Epochs of the warm-up: a fifth of a short run at most."""
    return min(recipe.warmup, recipe.epochs / 5)


def learning_rate(recipe: Recipe, iteration: int, *, per_epoch: int, drops: int = 0) -> float:
    """The learning rate of one iteration, counted from 0, after `drops` divisions by the drop factor."""
    warmup = round(warmup_epochs(recipe) * per_epoch)
    total = recipe.epochs * per_epoch
    rises = warmup and recipe.schedule != "triangle"  # which has its own rise
    ramp = min(1.0, (iteration + 1) / warmup) if rises else 1.0
    return ramp * _base_rate(recipe, iteration, warmup, total) / recipe.drop_factor**drops


def _base_rate(recipe: Recipe, iteration: int, warmup: int, total: int) -> float:
    match recipe.schedule:
        case "paper":
            return paper_rate(recipe.lr, recipe.weight_decay, iteration)
        case "poly":
            return poly_rate(recipe.lr, iteration, total, recipe.power)
        case "cosine":
            return cosine_rate(recipe.lr, max(0, iteration - warmup), total - warmup)
        case "triangle":
            return triangle_rate(recipe, iteration, warmup, total)
        case _:
            return recipe.lr


def paper_rate(initial: float, decay: float, iteration: int) -> float:
    """The paper's g_t = g_0 / (1 + g_0 lambda t), lambda the weight decay."""
    return initial / (1 + initial * decay * iteration)


def poly_rate(initial: float, iteration: int, total: int, power: float) -> float:
    """GoogLeNet's polynomial decay to zero at `total`."""
    return initial * (1 - min(iteration, total) / max(total, 1)) ** power


def cosine_rate(initial: float, iteration: int, total: int) -> float:
    """Half a cosine wave from `initial` to zero at `total`."""
    return initial * (1 + math.cos(math.pi * min(iteration, total) / max(total, 1))) / 2


def triangle_rate(recipe: Recipe, iteration: int, peak: int, total: int) -> float:
    """Up in a straight line to the rate at `peak`, and down in another; both ends are shares of the rate."""
    if iteration < peak:
        return recipe.lr * (recipe.lr_start + (1 - recipe.lr_start) * iteration / peak)
    left = (total - iteration) / max(total - peak, 1)
    return recipe.lr * (recipe.lr_end + (1 - recipe.lr_end) * max(left, 0.0))


def replayed_drops(drop_epochs: tuple[int, ...], epoch: int) -> int:
    """How many of the given drops lie at or before the start of this epoch."""
    return sum(at <= epoch for at in drop_epochs)


@dataclass
class LevelOff:
    """Drop when `patience` evaluations in a row bring no gain over the best; stop when a drop has not helped.

    A gain is more than `min_delta`. At most `levels` drops are made; levelling off after the last one stops.
    """

    patience: int
    levels: int
    min_delta: float = 0.0
    best: float | None = None
    waited: int = 0
    gained: bool = True
    drops: list[int] = field(default_factory=list)

    def update(self, accuracy: float, epoch: int) -> Verdict:
        """Judge the accuracy, or a negative loss, reached at the end of an epoch (`epoch` of them are done)."""
        if self.best is None or accuracy > self.best + self.min_delta:
            self.best, self.waited, self.gained = accuracy, 0, True
            return "go"
        self.waited += 1
        if self.waited < self.patience:
            return "go"
        if not self.gained or len(self.drops) == self.levels:
            return "stop"
        self.drops.append(epoch)
        self.waited, self.gained = 0, False
        return "drop"

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; the rule itself belongs to the recipe."""
        return {name: value for name, value in asdict(self).items() if name in _STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name in _STATE:
            setattr(self, name, state[name])
