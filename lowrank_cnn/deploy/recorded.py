"""A network's run as a CUDA graph: launches cost nothing, for inputs of one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lowrank_cnn.kernels.autotune.measure import captured
from lowrank_cnn.system.errors import LowRankError

_ROUNDED = 0.05
"""How far results in half precision may be off, relative to the largest value."""


@dataclass
class Recorded:
    """A graph, where it reads, and where it leaves its results; callers take turns."""

    graph: torch.cuda.CUDAGraph
    input: Tensor
    output: Any
    done: torch.cuda.Event
    lock: Any = field(default_factory=Lock)

    def takes(self, x: Tensor) -> bool:
        """Whether such an input can be replayed here and now: not within a tracer or another graph."""
        alike = (x.shape, x.dtype, x.device) == (self.input.shape, self.input.dtype, self.input.device)
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        return alike and not traced and not torch.cuda.is_current_stream_capturing()

    def __call__(self, x: Tensor) -> Any:
        """The results for an input, in memory of their own."""
        with self.lock, torch.cuda.device(self.input.device):
            torch.cuda.current_stream().wait_event(self.done)
            self.input.copy_(x)
            self.graph.replay()
            results = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.output)
            self.done.record()
        return results


@torch.inference_mode(False)
@torch.no_grad()
def recorded(network: Callable[[Tensor], Any], x: Tensor, memory_format: torch.memory_format) -> Recorded:
    """A run on inputs like this one, checked on another: a network that waits for the host cannot be recorded."""
    given = x.clone(memory_format=memory_format)
    results: list[Any] = []
    with torch.cuda.device(x.device):
        graph = captured(lambda: results.append(network(given)))
    found = Recorded(graph, given, results[-1], torch.cuda.Event())
    other = x.roll(1, -1)
    if not alike(found(other), network(other.contiguous(memory_format=memory_format))):
        raise LowRankError("the recorded graph does not follow its input.")
    return found


def alike(ours: Any, right: Any, *, single: float = 1e-2) -> bool:
    """Whether results are those of the same network, or layer, run another way.

    `single` is how far those in float32 may be off: over a network kernels add up in other orders, and by TF32.
    """
    close = {torch.float64: 1e-9, torch.float32: single}
    pairs = zip(tree_leaves(ours), tree_leaves(right), strict=True)
    return all(_close(a, b, close.get(b.dtype, _ROUNDED)) for a, b in pairs if isinstance(b, Tensor))


def _close(ours: Tensor, right: Tensor, tolerance: float) -> bool:
    if ours.shape != right.shape or not right.numel():
        return ours.shape == right.shape
    error, largest = (ours.double() - right.double()).abs().max(), right.double().abs().max()
    return bool(error <= tolerance * largest)
