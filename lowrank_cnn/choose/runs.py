"""The runs of a frontier: each trained by the recipe of its family, tested once, every answer kept."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from lowrank_cnn.choose.candidates import Builder, Design, find_design
from lowrank_cnn.choose.frontier import pack
from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.core.files import below
from lowrank_cnn.data import Data
from lowrank_cnn.train import fit
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import Record
from lowrank_cnn.train.trained import Trained, load_checkpoint

HELD_OUT = 0.1
"""The share of training images that settings are tried on."""
TEACHER_SEED = 2000


@dataclass(frozen=True)
class DesignRun:
    """A run to make: `rate` multiplies the learning rate. With `held_out`, it is tested on training images."""

    design: Design
    seed: int
    rate: float = 1.0
    held_out: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run: `right` has one bit for each test image, and is None if the loss was not finite."""

    wall: float
    right: bytes | None = None
    accuracy: float = 0.0
    images_per_second: float = 0.0
    train_accuracy: float = 0.0


@dataclass
class RunMaker:
    """Trains designs of one family from scratch, by one recipe on one device.

    `teacher` is a design that all others, thin dense ones too, learn from beside the labels; `folder` holds it.
    """

    builder: Builder
    data: Data
    recipe: Recipe
    device: str
    teacher: str = ""
    folder: Path = Path()
    _prepared: dict[bool, tuple[Data, Trained | None]] = field(default_factory=dict, init=False)

    def __call__(self, run: DesignRun) -> RunOutcome:
        began = time.monotonic()
        data, teacher = self._images_and_teacher(run.held_out)
        torch.manual_seed(run.seed)
        how = {"seed": run.seed, "rate": run.rate, "device": self.device, "teacher": teacher}
        try:
            record = train(self.builder(run.design), data, self.recipe, **how)
        except NotFiniteError:
            return RunOutcome(time.monotonic() - began)
        assert record.right is not None
        return RunOutcome(
            wall=time.monotonic() - began,
            right=pack(record.right),
            accuracy=int(record.right.sum()) / len(record.right),
            images_per_second=record.result["images_per_second"],
            train_accuracy=record.history[-1]["train_accuracy"],
        )

    def teach(self, *, held_out: bool) -> Record:
        """Train the teacher of the runs that follow, on the same images as these; one that is there stays."""
        torch.manual_seed(TEACHER_SEED)
        network = self.builder(find_design(self.teacher))
        how = {"seed": TEACHER_SEED, "device": self.device, "out": self._teacher_in(held_out)}
        return train(network, self._images(held_out), self.recipe, **how)

    def _images_and_teacher(self, held_out: bool) -> tuple[Data, Trained | None]:
        if held_out not in self._prepared:
            teacher = None
            if self.teacher:
                network = self.builder(find_design(self.teacher))
                teacher = load_checkpoint(self._teacher_in(held_out), network=network)
            self._prepared[held_out] = self._images(held_out), teacher
        return self._prepared[held_out]

    def _images(self, held_out: bool) -> Data:
        return self.data.holdout(round(HELD_OUT * len(self.data.train)), 0) if held_out else self.data

    def _teacher_in(self, held_out: bool) -> Path:
        return below(self.folder, self.folder / ("teacher-held-out" if held_out else "teacher"))


def train(
    network: nn.Module, data: Data, recipe: Recipe, *, rate: float = 1.0, out: Path | None = None, **how: Any
) -> Record:
    """Train by a multiple of the recipe's learning rate; the images to test on are used once, at the end.

    `how` are settings of `fit`. A run with a folder goes on from there. It is too short to pay for compiling.
    """
    recipe = replace(recipe, lr=rate * recipe.lr, evaluate_every=recipe.epochs)
    how |= {"out": out, "resume": out is not None, "compile": False, "progress": False}
    try:
        return fit(network, data, recipe, **how)
    finally:
        release_memory()


def release_memory() -> None:
    """Free the memory of a run on the device: graphs keep theirs until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Job = TypeVar("Job")
Result = TypeVar("Result")

_worker: list[Callable[[Any], Any]] = []
"""The function that does jobs, in a process of a pool."""


@dataclass
class WorkerPool(contextlib.ExitStack, Generic[Job, Result]):
    """Run jobs in several processes that share a device, or in this one if only one is asked for.

    A short run leaves a GPU idle while Python builds the network and reads results. Other runs can use that time.
    `do` does one job. Each process gets a copy of it, with the images that it holds, when it starts. All end with
    the block, and after an error at once: a run that is not finished is lost, and nothing else.
    """

    do: Callable[[Job], Result]
    processes: int = 1

    def __post_init__(self) -> None:
        super().__init__()
        check_number("processes", self.processes, least=1, whole=True)

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
            executor = self._executor
            with _without_interrupts():  # processes that start here inherit that: Ctrl-C is for this one alone
                return executor.submit(_do, job)
        done: Future[Result] = Future()
        try:
            done.set_result(self.do(job))
        except LowRankError as error:
            done.set_exception(error)
        return done

    @cached_property
    def _executor(self) -> ProcessPoolExecutor:
        # Through a file: a pipe would let this process wait for each of the others to import torch first.
        copy = Path(self.enter_context(TemporaryDirectory(prefix="lowrank-"))) / "do.pickle"
        with copy.open("wb") as file:
            pickle.dump(self.do, file)
        ended, alive = Pipe(duplex=False)
        self.callback(alive.close)
        executor = ProcessPoolExecutor(
            self.processes,
            mp_context=get_context("spawn"),  # a forked process cannot use CUDA
            initializer=_set_up,
            initargs=(copy, ended, max(1, torch.get_num_threads() // self.processes)),
        )
        self.callback(executor.shutdown, cancel_futures=True)
        self.push(lambda error, *_: alive.close() if error else None)
        return executor


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
    # take longer for a layer's filter groups than for the dense layer. Depthwise layers run by our kernels.
    os.environ.setdefault("LOWRANK_KERNELS", "dense" if torch.cuda.is_available() else "off")
    with copy.open("rb") as file:
        _worker[:] = [pickle.load(file)]


def _leave_with(ended: Connection) -> None:
    """End this process as soon as the other end of the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        ended.recv()
    os._exit(1)


def _do(job: Any) -> Any:
    return _worker[0](job)
