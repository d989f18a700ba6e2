"""Time functions in turns, after a warm-up, and report medians with quartiles."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from types import FrameType
from typing import Any, TypeVar

import torch

from lowrank_cnn.core.errors import check_number

Key = TypeVar("Key", bound=Hashable)
_FEWEST = 3
_MOST_REPEATS = 10**6
_STEADY = 1.5
_MOST_THREADS = 1024
"""Torch crashes if the system refuses more."""


@dataclass(frozen=True)
class Sample:
    """Milliseconds: the median of several runs, or the least, and the quartiles."""

    ms: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """The upper quartile over the lower."""
        return self.high / self.low if self.low else 1.0

    @property
    def steady(self) -> bool:
        """Whether the quartiles are close together; if not, another process ran meanwhile."""
        return self.spread <= _STEADY


def measure(
    runs: Mapping[Key, Callable[[], object]],
    *,
    repeats: int = 15,
    budget: float = 20.0,
    cuda: bool = False,
    rest: float = 0.0,
    warm: int = 0,
    fewest: int = _FEWEST,
    of: Callable[[Sequence[float]], float] = median,
) -> dict[Key, Sample]:
    """Time several functions in turns: each `repeats` times, or fewer (at least `fewest`) within `budget` seconds.

    `rest` seconds pass before each run: the threads of a runtime spin for a while after its last run, and would
    slow down the next runtime. `warm` runs that are not timed follow the rest, to wake threads and fill caches.
    `of=min` takes the least time in place of the median, to compare short runs with long ones on a busy machine:
    other processes interrupt most of the long runs and few of the short ones.

        measure({"dense": lambda: dense(x), "low-rank": lambda: low_rank(x)})["dense"].ms
    """
    check_repeats(repeats)
    end = time.perf_counter() + budget
    for run in runs.values():  # twice: the first run of a kernel also compiles, allocates or packs
        for _ in range(2):
            if fewest > 1 or time.perf_counter() < end:
                run()
    times: dict[Key, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        if turn >= fewest and time.perf_counter() > end:
            break
        for name, run in runs.items():
            time.sleep(rest)
            for _ in range(warm):
                run()
            start = _mark(cuda)
            run()
            times[name].append(_between(start, _mark(cuda)))
    quartiles = {name: quantiles(taken, n=4) if len(taken) > 1 else 3 * taken for name, taken in times.items()}
    return {
        name: Sample(of(times[name]), low, high, len(times[name])) for name, (low, _, high) in quartiles.items()
    }


def check_repeats(repeats: int) -> None:
    """Refuse fewer runs than a median with quartiles needs, and absurdly many."""
    check_number("repeats, the runs of a median with quartiles,", repeats, least=_FEWEST, most=_MOST_REPEATS)


def check_budget(seconds: float) -> None:
    """Refuse a budget that is not positive."""
    check_number("budget, in seconds,", seconds, above=0)


class OutOfTime(BaseException):
    """A block took longer than its deadline. Code that catches every `Exception` lets it through."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Stop a block by OutOfTime after this many seconds, even inside a compiler, but not inside an import.

    It uses a signal, which Python delivers to the main thread only: in other threads the block runs to its end.
    """
    deaf = threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer")
    if deaf or seconds == float("inf"):
        yield
        return

    def stop(_signal: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # half a module would stay
                return
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 2.0, 2.0)  # again: destructors drop exceptions
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 0.05)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch's operations use this number of threads within the block; None keeps the current number."""
    if threads is not None:
        check_number("threads", threads, least=1, most=_MOST_THREADS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Marks:
    """Milliseconds between the first and the second mark of a name, the third and the fourth, and so on.

    On CUDA the marks are events, which do not make the host wait.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self.cuda = cuda
        self.marks: dict[str, list[Any]] = defaultdict(list)

    def mark(self, name: str) -> None:
        self.marks[name].append(_mark(self.cuda))

    def collect(self) -> dict[str, float]:
        """The time of each name since the last call."""
        marks, self.marks = self.marks, defaultdict(list)
        return {name: sum(map(_between, found[::2], found[1::2])) for name, found in marks.items()}


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    if not isinstance(stop, torch.cuda.Event):
        return 1000 * (stop - start)
    stop.synchronize()
    return start.elapsed_time(stop)
