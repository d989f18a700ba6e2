"""Choose how the steps of a run execute: compiled by torch or not, as a CUDA graph or kernel by kernel.

Every way computes the same step, within rounding. The choice is measured on the run's first batch: each way takes
a few steps. The compiled one is tried only if enough training is left to pay for compiling, and used only if its
gradients agree. Weights, statistics and random numbers are restored afterwards, so a choice leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels.autotune.compile_ahead import prepare
from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.system.errors import first_line
from lowrank_cnn.system.memory import is_out_of_memory
from lowrank_cnn.train.step import GraphedStep, TrainingStep, put_back

Compile = bool | Literal["auto"]
Update = Callable[[Tensor, Tensor], None]
Say = Callable[[str], None]
EAGER, COMPILED = "eager", "compiled"

PAYS_AFTER = 600.0
"""Seconds of training left from which compiling pays: it takes about half a minute, and saves a tenth or more."""
TIMED_STEPS = 10
BRIGHTER = 1 + 2**-8
"""Images so much brighter are the same to a network but for rounding: what changes is the noise of a step."""
SURE, NOISES = 0.01, 3
"""Gradients of two ways may differ by this share of their norm, and by this many times that noise."""


@dataclass(frozen=True)
class Execution:
    """How steps execute. A record holds it as a dictionary, and a resumed run keeps it."""

    compiled: bool = False
    cuda_graph: bool = False

    def __str__(self) -> str:
        network = "compiled by torch" if self.compiled else "not compiled"
        return f"{network}, {'replayed as a CUDA graph' if self.cuda_graph else 'launched kernel by kernel'}"


Built = tuple[Update, Execution]


@dataclass
class StepBuilder:
    """Builds the fastest update from the forwards that a run may use, by name; `graphs` allows CUDA graphs."""

    forwards: Mapping[str, nn.Module]
    graphs: bool
    say: Say = print

    def fastest(self, step: TrainingStep, images: Tensor, labels: Tensor, *, steps_left: int) -> Built:
        """The fastest update for batches like this one, and how it executes."""
        if COMPILED not in self.forwards:
            return self._build(EAGER, step, images, labels)
        if EAGER not in self.forwards:
            return self._build(COMPILED, step, images, labels)
        update, execution = self._build(EAGER, step, images, labels)
        plain = _time_steps(step, update, images, labels)
        if plain.seconds * steps_left < PAYS_AFTER:
            return update, execution
        # One graph at a time: each keeps the maps of a whole step.
        del update
        step.optimizer.zero_grad()
        if (compiled := self._compiled(step, images, labels, plain)) is not None:
            return compiled
        return self._build(EAGER, step, images, labels)

    def _compiled(self, step: TrainingStep, images: Tensor, labels: Tensor, plain: TimedSteps) -> Built | None:
        """The compiled update; None if it fails, disagrees or is no faster."""
        try:
            update, execution = self._build(COMPILED, step, images, labels)
            trial = _time_steps(step, update, images, labels)
        except Exception as error:  # a compiler can fail at anything that a foreign forward does
            self.say(f"The network is not compiled: {first_line(error)}.")
            return None
        times = f"{trial.seconds * 1e3:.1f} ms a step compiled, {plain.seconds * 1e3:.1f} ms without"
        apart = _apart(trial.gradients, plain.gradients)
        if not apart <= SURE + NOISES * plain.noise:  # a NaN is refused too
            self.say(f"The network is not compiled: its gradients would differ by {apart:.1g}.")
            return None
        if trial.seconds >= plain.seconds:
            self.say(f"The network is not compiled, which is no faster: {times}.")
            return None
        self.say(f"The network is compiled by torch: {times}.")
        return update, execution

    def _build(self, way: str, step: TrainingStep, images: Tensor, labels: Tensor) -> Built:
        """The update by one way, as a CUDA graph if that is possible."""
        compiled = way == COMPILED
        step.forward = self.forwards[way]
        if not self.graphs:
            return step, Execution(compiled)
        try:
            # Kernels are measured and compiled before torch traces, which can do neither.
            with for_graphs():
                with put_back(step.tensors(), images.device):
                    if compiled:
                        _choose_kernels(self.forwards[COMPILED], step, images, labels)
                    else:
                        prepare(lambda: step.forward(images))
                return GraphedStep(step, images, labels), Execution(compiled, cuda_graph=True)
        except RuntimeError as error:
            if is_out_of_memory(error) or compiled:
                raise
            self.say(f"Steps run one kernel at a time, not as a CUDA graph: {first_line(error)}.")
            return step, Execution(compiled)


@dataclass(frozen=True)
class TimedSteps:
    """Seconds per step by one way, the gradients of the first step, and how far rounding alone moves them."""

    seconds: float
    gradients: list[Tensor]
    noise: float


def _choose_kernels(forward: nn.Module, step: TrainingStep, images: Tensor, labels: Tensor) -> None:
    """One step without the compiler: layers choose their kernels by measuring, which a trace cannot."""
    with torch.compiler.set_stance("force_eager"):
        prepare(lambda: forward(images))
        step(images, labels)


def _time_steps(step: TrainingStep, update: Update, images: Tensor, labels: Tensor) -> TimedSteps:
    with put_back(step.tensors(), images.device):
        gradients = _gradients(step, update, images, labels)
        noise = _apart(_gradients(step, update, images * BRIGHTER, labels), gradients)
        _wait(images.device)
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            update(images, labels)
        _wait(images.device)
        seconds = (time.perf_counter() - began) / TIMED_STEPS
    return TimedSteps(seconds, gradients, noise)


def _gradients(step: TrainingStep, update: Update, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradients of one step from the current weights and random numbers."""
    with put_back(step.tensors(), images.device):
        update(images, labels)
        return [p.grad.detach().clone() for p in step.parameters.values() if p.grad is not None]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _apart(found: list[Tensor], right: list[Tensor]) -> float:
    """The norm of the difference of two lists of gradients, relative to the second's."""
    if len(found) != len(right):
        return float("inf")
    away = [a.float() - b.float() for a, b in zip(found, right, strict=True)]
    return float(nn.utils.get_total_norm(away) / nn.utils.get_total_norm(right).clamp_min(1e-12))


def resolved(compile: Compile, *, able: bool, before: dict[str, Any]) -> Compile:
    """Resolve `compile`: a resumed run keeps its setting, and without a capable GPU (`able`) it is off."""
    if compile != "auto":
        return compile
    return bool(before["compiled"]) if "compiled" in before else "auto" if able else False
