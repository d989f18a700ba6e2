"""When the shapes of filters are chosen while a network trains, and within which budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.method.shape_choice import ShapeChooser
from lowrank_cnn.method.shape_damage import Damage, damage_by_loss
from lowrank_cnn.method.shape_gates import charge_gates, close_gates, damage_by_gates, learn_gates
from lowrank_cnn.method.shaping import GatedLinear, ShapedConv2d
from lowrank_cnn.train.objective import Loss
from lowrank_cnn.train.record import Epoch

FALLING, CHOOSING = 0.4, 0.6
"""Shares of the epochs: until the budget has fallen to the target, and until shapes stay as they are."""


@dataclass(frozen=True)
class ShapeSchedule:
    """The callback of `fit` that chooses shapes after an epoch, within a budget that falls to its target."""

    chooser: ShapeChooser
    target: float
    epochs: int
    by: str = "energy"
    sample: Callable[[int, nn.Module], Iterator[tuple[Tensor, Any]]] | None = None
    """Batches after an epoch, to measure the damage of shapes on, or to move gates."""
    loss: Loss = functional.cross_entropy
    choose_last: Callable[[Callable[[float], Any], nn.Module], None] | None = None
    """Makes the last choice, by a function that chooses for a share; the target is that share by default."""
    met: list[int] = field(default_factory=list)
    """The epochs of this process."""

    @property
    def changes_until(self) -> int:
        """The epoch after which shapes are chosen for the last time."""
        return max(1, round(CHOOSING * self.epochs))

    def share_after(self, epoch: int) -> float:
        """The share of the dense cost that is allowed after an epoch: it falls quickly first, then slowly."""
        falling = max(1, min(self.changes_until, round(FALLING * self.epochs)))
        left = max(0.0, 1 - epoch / falling)
        return self.target + (1 - self.target) * left**3

    def __call__(self, row: Epoch, network: nn.Module) -> None:
        self.met.append(row.epoch)
        if row.epoch > self.changes_until:
            return
        if self.by == "proximal" and row.epoch < self.changes_until:
            self.chooser.choose(network, self.target, self._damage(row.epoch, network, self.target))
            _shrink(network, (row.epoch / self.changes_until) ** 2)
        else:
            self._choose_within(self.share_after(row.epoch), row.epoch, network)
        _agree(network)

    def _choose_within(self, share: float, epoch: int, network: nn.Module) -> None:
        damage = self._damage(epoch, network, share)
        if self.by == "gates" and epoch == self.changes_until:
            close_gates(network)
        if epoch == self.changes_until and self.choose_last is not None:
            self.choose_last(lambda allowed: self.chooser.choose(network, allowed, damage), network)
        else:
            self.chooser.choose(network, share, damage)

    def _damage(self, epoch: int, network: nn.Module, share: float) -> dict[str, Damage] | None:
        """What shapes would lose; None for the damage by energy. Gates are moved first."""
        if self.sample is None:
            return None
        batches, loss = self.sample(epoch, network), self.loss
        if self.by != "gates":
            return damage_by_loss(network, self.chooser.routes, batches, loss)
        learn_gates(network, batches, loss)
        charge_gates(network, self.chooser.costs, share)
        return damage_by_gates(network)


def _shrink(network: nn.Module, share: float) -> None:
    """Shrink the taps outside the shapes that were chosen, and use all taps again."""
    for layer in network.modules():
        if isinstance(layer, ShapedConv2d):
            layer.shrink_outside(share)
        elif isinstance(layer, GatedLinear):
            layer.inputs.fill_(True)


def _agree(network: nn.Module) -> None:
    """Copy the choice of the first process to all: sums on GPUs may differ in their last bits."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    for module in network.modules():
        for name in ("choice", "kept", "inputs", "gates", "charge"):
            buffer = getattr(module, name, None)
            if isinstance(module, ShapedConv2d | GatedLinear) and buffer is not None:
                value = buffer if buffer.is_floating_point() else buffer.long()
                torch.distributed.broadcast(value, 0)
                buffer.copy_(value)
