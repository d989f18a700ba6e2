"""Time one thing on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import milliseconds as spread_of
from lowrank_cnn.kernels.cuda_graph import captured


def milliseconds(run: Callable[[], Any], repeats: int = 21) -> dict[str, float]:
    """Median and spread of the device's time alone: a captured graph, the L2 cache flushed before each replay.

    A launch written in Python takes longer than a small layer runs; between events it would be timed instead.
    """
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    graph = captured(run)
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return spread_of(times)
