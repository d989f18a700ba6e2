"""The budget of a run that learns shapes: what each shape costs, found when the run starts and kept with it.

A run that is resumed reads the costs again, because times measured twice differ. It has to ask for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.optimizing import optimize
from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.method.settling import settle
from lowrank_cnn.method.shape_choice import ShapeCosts
from lowrank_cnn.method.shape_damage import shaped_convs
from lowrank_cnn.method.shape_network import mac_costs
from lowrank_cnn.method.shape_times import Prepare, as_it_is, corrected, time_costs, time_share
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import UnreadableError, read_json, write_json
from lowrank_cnn.system.processes import first_process
from lowrank_cnn.train.determinism import generator_states, restore_generators
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.fabric import made_by_first, resolve_device
from lowrank_cnn.train.recipe import in_words

BATCH = 64
"""Images at a time that a GPU is timed with, unless the user says how many."""
COSTS, _LAST = "shape_costs.json", "last_share"
"""The file in the directory of a run, and in it the share that the last choice was made for."""
_TRIES, _CLOSE, _FURTHEST = 4, 0.02, 0.8
"""Tries of the last choice, the excess that is no reason for another, and the least factor of one."""


def as_optimized(network: nn.Module, image: Tensor) -> Callable[[], object]:
    """A network that is timed as it is deployed on a GPU: norms folded, kernels chosen, one CUDA graph."""
    fast = optimize(network, image, compile=False)
    return lambda: fast(image)


@dataclass(frozen=True)
class ShapeBudget:
    """What a run was asked for, such as `{"macs": 0.4, "by": "proximal"}`, and its directory, if it has one.

    Times are measured on `device`, with `batch` images at a time.
    """

    asked: Mapping[str, Any]
    directory: RunDirectory | None
    device: str = "auto"
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and (not isinstance(self.batch, int) or self.batch < 1):
            raise LowRankError(f"batch is the number of images at a time, one or more, not {self.batch!r}.")

    def costs(self, shaped: nn.Module, model: nn.Module, size: tuple[int, ...], *, resume: bool) -> ShapeCosts:
        """The cost of each shape in every layer. The first process finds it for all, and keeps it by `keep`."""

        def find() -> ShapeCosts:
            if self.directory and not resume:
                self.directory.check_free()
            known = self._kept(shaped) if resume else None
            if known is not None:
                return known
            if "macs" in self.asked:
                return mac_costs(shaped, model, size)
            dense = self._placed(model)
            costs = time_costs(shaped, dense, size, **self._how)
            return corrected(costs, shaped, dense, size, self.asked["latency"], **self._how)

        return made_by_first(find, self.device)

    def time_of(self, network: nn.Module, model: nn.Module, size: tuple[int, ...]) -> float | None:
        """The measured time of the result as a share of the dense network's; None for a budget of MACs."""
        if "latency" not in self.asked:
            return None
        device = torch.device(resolve_device(self.device))
        before = generator_states(device)
        try:
            return made_by_first(lambda: self._time_share(settle(network, size), model, size), self.device)
        finally:
            restore_generators(before, device)  # a run draws the same numbers whether it is timed or not

    def choose_last(
        self,
        choose: Callable[[float], Any],
        network: nn.Module,
        *,
        blank: nn.Module,
        model: nn.Module,
        size: tuple[int, ...],
    ) -> None:
        """Choose for the last time: within less than the budget if the network that is found takes longer.

        If no try is within the budget, the fastest is taken.
        `blank` is a copy of the network from before training: layers have hooks while they train, which take time.
        The share that was taken is kept: a run that is killed before its next checkpoint then chooses the same.
        """
        share = made_by_first(self._last_share, self.device)
        if share is not None:
            choose(share)
            return
        share, tried = self.asked["latency"], {}
        for _ in range(_TRIES):
            choose(share)
            blank.load_state_dict(network.state_dict())
            tried[share] = taken = self.time_of(blank, model, size) or 0.0
            if not self.exceeded_by(taken):
                break
            share *= max(_FURTHEST, self.asked["latency"] / taken)
        best = min(tried, key=lambda share: tried[share])
        if best != share:
            choose(best)
        if self.directory and first_process():
            path = self.directory.path / COSTS
            write_json(path, {**read_json(path), _LAST: best})

    def exceeded_by(self, time: float) -> bool:
        """Whether a measured share of the time is above the budget, by more than times differ."""
        return time > (1 + _CLOSE) * self.asked["latency"]

    def _last_share(self) -> float | None:
        path = self.directory.path / COSTS if self.directory else None
        return read_json(path).get(_LAST) if path and path.is_file() else None

    def _time_share(self, network: nn.Module, model: nn.Module, size: tuple[int, ...]) -> float:
        return time_share(network, self._placed(model), size, **self._how)

    def _placed(self, model: nn.Module) -> nn.Module:
        return copy_with(model).to(resolve_device(self.device))

    @property
    def _how(self) -> dict[str, Any]:
        """How networks are timed: on a GPU through `optimize`, many images at a time."""
        device = resolve_device(self.device)
        prepare: Prepare = as_optimized if device.startswith("cuda") else as_it_is
        return {"batch": self.batch or (1 if device == "cpu" else BATCH), "prepare": prepare}

    def keep(self, costs: ShapeCosts) -> None:
        """Write the costs of a run that begins, for when it is resumed."""
        if self.directory is None:
            return
        path = self.directory.path / COSTS
        if not (self.directory.holds_run() and path.is_file()):
            write_json(path, {"asked": dict(self.asked), "costs": costs.to_dict()})

    def _kept(self, shaped: nn.Module) -> ShapeCosts | None:
        """The costs of the run that goes on, which has to ask for the same; None if it has not begun."""
        if self.directory is None or not self.directory.holds_run():
            return None
        path = self.directory.path / COSTS
        if not path.is_file():
            return None
        try:
            found = read_json(path)
            asked, costs = dict(found["asked"]), ShapeCosts(**found["costs"])
            known = {name: len(prices) for name, prices in costs.filters.items()}
        except (UnreadableError, ValueError, TypeError, KeyError, AttributeError) as error:
            told = f"{path} holds no costs of shapes: remove it, and they are found anew."
            raise LowRankError(told) from error
        names = {*asked, *self.asked}
        differ = {n: (asked.get(n), self.asked.get(n)) for n in names if asked.get(n) != self.asked.get(n)}
        if differ:
            raise LowRankError(f"the run in {self.directory.path} learns shapes with {in_words(differ)}.")
        if known != {name: len(layer.shapes) for name, layer in shaped_convs(shaped).items()}:
            raise LowRankError(f"{path} holds the costs of another network: choose another --out.")
        return costs
