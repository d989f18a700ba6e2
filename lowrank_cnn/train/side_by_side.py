"""Run trainings side by side: several processes that share one device, and the results in a fixed order.

A short run leaves a GPU idle while Python builds the network and reads results. Other runs can use that time. Each
process is set up once, with its images in memory, and then does one job after the other. Times of such runs are
not comparable with those of runs that had the device alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

import torch

from lowrank_cnn.system.errors import LowRankError

Job = TypeVar("Job")
Result = TypeVar("Result")

_worker: list[Callable[[Any], Any]] = []
"""What does the jobs of this process, in a process of a pool."""


@dataclass
class WorkerPool(Generic[Job, Result]):
    """Run jobs in several processes, or in this one if only one is asked for.

    `do` does one job. Each process gets a copy of it, with the images that it holds, when it starts.
    """

    do: Callable[[Job], Result]
    processes: int = 1
    _executor: ProcessPoolExecutor | None = field(default=None, init=False)
    _folder: TemporaryDirectory[str] | None = field(default=None, init=False)
    _alive: Connection | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise LowRankError(f"trainings run in one process or more, not in {self.processes}.")

    def __enter__(self) -> WorkerPool[Job, Result]:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the processes, and after an error at once: a run that is not finished is lost, and nothing else."""
        if self._executor and self._alive:
            if error is not None:
                self._alive.close()
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._alive.close()
            self._executor = self._alive = None
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def results(
        self,
        jobs: Iterable[Job],
        *,
        ready: Callable[[Job], bool] = lambda _: True,
        may_begin: Callable[[Job], bool] = lambda _: True,
    ) -> Iterator[tuple[Job, Result | LowRankError]]:
        """Each job with its result, or with the error that it raised, in the order in which they began.

        The next job to begin is the first that is `ready`: one may wait for the result of another. As soon as
        `may_begin` refuses a job, no other begins, and those that run are waited for.
        """
        waiting, begun = deque(jobs), deque[tuple[Job, Future[Result]]]()
        while True:
            while sum(not future.done() for _, future in begun) < self.processes:
                job = next((job for job in waiting if ready(job)), None)
                if job is None:
                    break
                if not may_begin(job):
                    waiting.clear()
                    break
                waiting.remove(job)
                begun.append((job, self._begin(job)))
                if self.processes == 1:
                    break
            if not begun:
                return
            if not begun[0][1].done():
                wait([future for _, future in begun if not future.done()], return_when=FIRST_COMPLETED)
            while begun and begun[0][1].done():
                job, future = begun.popleft()
                yield job, _outcome(future)

    def _begin(self, job: Job) -> Future[Result]:
        if self.processes > 1:
            executor = self._started()
            with _without_interrupts():  # processes that start here inherit that: Ctrl-C is for this one alone
                return executor.submit(_do, job)
        done: Future[Result] = Future()
        try:
            done.set_result(self.do(job))
        except LowRankError as error:
            done.set_exception(error)
        return done

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            ended, self._alive = Pipe(duplex=False)
            threads = max(1, torch.get_num_threads() // self.processes)
            # Through a file: a pipe would let this process wait for each of the others to import torch first.
            self._folder = TemporaryDirectory(prefix="lowrank-")
            copy = Path(self._folder.name) / "do.pickle"
            with copy.open("wb") as file:
                pickle.dump(self.do, file)
            self._executor = ProcessPoolExecutor(
                self.processes,
                mp_context=get_context("spawn"),  # a forked process cannot use CUDA
                initializer=_set_up,
                initargs=(copy, ended, threads),
            )
        return self._executor


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends, where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(future: Future[Result]) -> Result | LowRankError:
    try:
        return future.result()
    except LowRankError as error:
        return error
    except BrokenProcessPool as error:
        raise LowRankError(
            "a process that trained was killed, or could not start: what has finished is saved; start again with "
            'fewer processes. (A script needs `if __name__ == "__main__":` around its calls.)'
        ) from error


def _set_up(copy: Path, ended: Connection, threads: int) -> None:
    """Prepare a process of the pool: it ends with the one that started it, and never measures kernels."""
    threading.Thread(target=_leave_with, args=(ended,), daemon=True).start()
    torch.set_num_threads(threads)
    # Kernels are chosen by time, and a device that is shared has no times to choose by. On a GPU, torch's convs
    # take longer for a layer's filter groups than for the dense layer.
    os.environ.setdefault("LOWRANK_KERNELS", "dense" if torch.cuda.is_available() else "off")
    with copy.open("rb") as file:
        _worker[:] = [pickle.load(file)]


def _leave_with(ended: Connection) -> None:
    """End this process as soon as the other end of the connection is closed, by intention or by a kill."""
    with contextlib.suppress(EOFError, OSError):
        ended.recv()
    os._exit(1)


def _do(job: Any) -> Any:
    return _worker[0](job)
