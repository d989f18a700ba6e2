"""CUDA graphs: capture work once and replay it without launches, for measuring, training and inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.compare import agree, copied
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.device import for_graphs

WARM_UP_RUNS = 3


@dataclass(frozen=True)
class Captured:
    """A function's work as a graph. The function is kept because it owns the weights that the graph reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


def captured(run: Callable[[], object], *, before_capture: Callable[[], object] | None = None) -> Captured:
    """Capture a function's work as a graph, after runs that warm it up and that `before_capture` may undo."""
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
        # "thread_local" lets other threads, such as data loaders, call CUDA meanwhile.
        # A stream of this device: torch's own capture stream belongs to the first device that captured.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    return Captured(graph, run)


@lru_cache(maxsize=8)
def _stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: torch has few, and may hand the same one to a data loader."""
    return torch.cuda.Stream(device)


@dataclass
class Recorded:
    """A network's run as a graph, with the memory of its input and output; callers take turns.

    A replay of a small network takes as long as the Python around it, so a call does only what is needed. It waits
    for another stream only if the last call used another one.
    """

    graph: Captured
    input: Tensor
    output: Any
    stream: torch.cuda.Stream | None = None
    lock: Any = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.alike = (self.input.shape, self.input.dtype, self.input.device)

    def takes(self, x: Tensor) -> bool:
        """Whether an input can be replayed now: it has the size of the capture, and nothing traces or captures."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        alike = (x.shape, x.dtype, x.device) == self.alike
        return alike and not traced and not torch.cuda.is_current_stream_capturing()

    def __call__(self, x: Tensor) -> Any:
        """The results for an input, in new memory."""
        device = self.input.device
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self(x)
        with self.lock:
            stream = torch.cuda.current_stream(device)
            if stream != self.stream:
                if self.stream is not None:
                    stream.wait_stream(self.stream)
                self.stream = stream
            self.input.copy_(x.detach())
            self.graph.replay()
            return self.output.clone() if isinstance(self.output, Tensor) else copied(self.output)[0]


@torch.inference_mode(False)
@torch.no_grad()
def recorded(run: Callable[[Tensor], Any], x: Tensor) -> Recorded:
    """Capture a run on this input and compare it on another one; networks that wait for the host fail."""
    given = x.clone(memory_format=torch.preserve_format)
    kept: dict[str, Any] = {}
    with torch.cuda.device(x.device):
        graph = captured(lambda: kept.update(output=run(given)))
    found = Recorded(graph, given, kept["output"])
    other = given.roll(1, -1).clone(memory_format=torch.preserve_format)
    if not agree(found(other), run(torch.empty_like(given).copy_(other)), single=1e-2):
        raise LowRankError("the recorded graph ignores its input.")
    return found
