"""A learning-rate range test (Smith, 2015): train a copy of a network while the rate grows, and watch the loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import counted
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.train.distributed import launch, resolve_precision, seed_generators
from lowrank_cnn.train.failure import oom_as_user_error
from lowrank_cnn.train.fit import open_with_recipe
from lowrank_cnn.train.inputs import check_fits, make_inputs
from lowrank_cnn.train.objective import Loss, Objective
from lowrank_cnn.train.optimizers import freeze_parameters
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import TrainingStep, put_back

_KEPT, _SETTLED = 0.9, 10
"""The share of the mean loss that stays when another is averaged in, and the steps until the mean is steady."""
_LOST = 4.0
"""The test ends when the mean loss is this many times its lowest: the network is lost."""
_BELOW_LOWEST = 4.0
"""The rate with the lowest loss is nearly too high for a whole run. A tenth of it is usual; with 1,000 images of
CIFAR-10, a half and a quarter trained better than an eighth (docs/training.md)."""


@dataclass(frozen=True)
class RateTest:
    """The rates of a range test and the mean losses at them; `rate` is the suggestion, None if no loss fell."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    rate: float | None

    def __str__(self) -> str:
        tried = f"{counted(len(self.rates), 'step')} at rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if self.rate is None:
            return f"No rate is suggested: the loss did not fall in {tried}."
        place = self.losses.index(min(self.losses))
        lowest = f"The loss is lowest ({self.losses[place]:.3f}) at a rate of {self.rates[place]:.2g}"
        return f"Suggested rate: {self.rate:g}. {lowest}, in {tried}."


@progress("find_lr")
def find_lr(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str | None = None,
    *,
    steps: int = 100,
    lowest: float = 1e-4,
    highest: float = 10.0,
    loss: Loss | None = None,
    seed: int = 0,
    device: str = "auto",
    **settings: Any,
) -> RateTest:
    """Suggest a learning rate: train a copy of the network for some steps while the rate grows exponentially.

    >>> find_lr(network, "photos").rate  # doctest: +SKIP
    0.2

    The network stays as it is, and nothing is written. Images, recipe and `settings` are those of `fit`. The test
    ends early when the loss explodes or is no number. The suggestion is a quarter of the rate with the lowest
    loss.
    """
    check_number("steps", steps, least=2 * _SETTLED, whole=True)
    check_number("lowest", lowest, above=0)
    check_number("highest", highest, above=lowest)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise LowRankError("find_lr runs in one process: start it without torchrun.")
    opened, found, how = open_with_recipe(model, data, recipe, settings, loss=loss)
    found = dataclasses.replace(found, ema=0.0, lookahead=0, quantize="none", helper=0.0, whiten_first=False)
    fabric = launch(device, found.precision)
    with put_back((), fabric.device), oom_as_user_error(found.batch_size, fabric.device):
        seed_generators(seed, 0)
        network = copy_with(model).to(fabric.device).train()
        inputs = make_inputs(fabric, opened, found, how, seed=seed, saved=None)
        check_fits(network, inputs.size, None if loss else len(opened.classes), fabric.device, found.output)
        for module in freeze_parameters(network, found.freeze):
            module.eval()
        scaled = resolve_precision(found.precision, fabric.device.type) == "fp16"
        options = {"objective": Objective(found, loss=loss), "scaled": scaled}
        forward = fabric.setup_module(network)
        update = TrainingStep(network, forward, fabric.backward, found, fabric.device, **options)
        batches = itertools.chain.from_iterable(inputs.batches(epoch, 0) for epoch in itertools.count())
        rates = [lowest * (highest / lowest) ** (place / (steps - 1)) for place in range(steps)]
        losses: list[float] = []
        mean = 0.0
        for place, (rate, (images, targets)) in enumerate(zip(rates, batches, strict=False)):
            step(f"{place} of {counted(steps, 'step')}")
            update.sums.zero_()
            update.prepare(rate, place)
            update(images, targets)
            tally = update.read_tally()
            mean = _KEPT * mean + (1 - _KEPT) * tally.loss / max(tally.images, 1)
            now = mean / (1 - _KEPT ** (place + 1))  # without the zero that the mean began with
            if tally.halted or not math.isfinite(now) or now > _LOST * min(losses, default=math.inf):
                break
            losses.append(now)
    if not losses:
        raise LowRankError("the loss is not finite at the lowest rate: look at the network and its images first.")
    place = losses.index(min(losses))
    rate = float(f"{rates[place] / _BELOW_LOWEST:.0e}") if place >= _SETTLED else None
    return RateTest(tuple(rates[: len(losses)]), tuple(losses), rate)
