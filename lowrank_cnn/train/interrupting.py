"""Stopping within a step: on a CPU, a batch of large images may take minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.randomness import generator_states, restore_generators


class StoppedWithin(Exception):
    """A step was left before it changed any weight."""


@dataclass
class StepStart:
    """What a step changes before its update: statistics of batch norms, and random generators."""

    buffers: list[tuple[Tensor, Tensor]]
    generators: dict[str, Tensor]
    device: torch.device

    @classmethod
    def of(cls, network: nn.Module, device: torch.device) -> StepStart:
        return cls([(b, b.clone()) for b in network.buffers()], generator_states(device), device)

    @torch.no_grad()
    def restore(self) -> None:
        """Stand where the step began."""
        for buffer, value in self.buffers:
            buffer.copy_(value)
        restore_generators(self.generators, self.device)


@contextlib.contextmanager
def stopping_within(network: nn.Module, stop: StopRequest) -> Iterator[None]:
    """While the block lasts, raise `StoppedWithin` between two layers, forward or backward, once asked to stop."""

    def check(*_: object) -> None:
        if stop:
            raise StoppedWithin

    def check_backward(_: nn.Module, __: object, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(check)

    layers = [module for module in network.modules() if not list(module.children())]
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    hooks += [layer.register_forward_hook(check_backward) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
