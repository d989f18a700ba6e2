"""CUDA graphs: work captured once and replayed without launches, for measuring, training and inference alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.system.compare import agree
from lowrank_cnn.system.errors import LowRankError

WARM_UP_RUNS = 3


def captured(
    run: Callable[[], object], *, before_capture: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    """A function's work as a graph, after it has run outside of one: compiled, allocated, algorithms chosen.

    `before_capture` is called between the warm-up and the capture, to undo what the warm-up changed.
    """
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with for_graphs():
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if before_capture is not None:
            before_capture()
        graph = torch.cuda.CUDAGraph()
        # Threads that only load data may call CUDA meanwhile: "thread_local" leaves them alone.
        # The stream of this device: torch's own for captures is that of the first device that captured.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


@lru_cache(maxsize=8)
def _stream(device: int) -> torch.cuda.Stream:
    """One for all captures of a device: torch has few, and gives them out again, to a loader say."""
    return torch.cuda.Stream(device)


@dataclass
class Recorded:
    """A network's run as a graph, where it reads, and where it leaves its results; callers take turns."""

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
def recorded(run: Callable[[Tensor], Any], x: Tensor) -> Recorded:
    """A run on inputs like this one, checked on another: a network that waits for the host cannot be recorded."""
    given = x.clone(memory_format=torch.preserve_format)
    results: list[Any] = []
    with torch.cuda.device(x.device):
        graph = captured(lambda: results.append(run(given)))
    found = Recorded(graph, given, results[-1], torch.cuda.Event())
    other = given.roll(1, -1).clone(memory_format=torch.preserve_format)
    if not agree(found(other), run(torch.empty_like(given).copy_(other)), single=1e-2):
        raise LowRankError("the recorded graph does not follow its input.")
    return found
