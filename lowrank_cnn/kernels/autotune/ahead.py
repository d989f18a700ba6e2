"""Compile the kernels of a network ahead of its first step, side by side.

Met one after another, the layers of a network would each compile their kernels, and wait: for VGG-11 half a
minute, for GoogLeNet more than one. What they will ask for is known once a forward has run on tensors that have a
shape and no memory; Triton then compiles all of it on every core.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

import torch

from lowrank_cnn.kernels.autotune.choice import in_question
from lowrank_cnn.kernels.autotune.support import Request
from lowrank_cnn.kernels.autotune.trial import Trial
from lowrank_cnn.kernels.mode import compiling_ahead, mode, surveying

WORKERS = 16
"""At most; the part of a compilation that holds Python's lock leaves no more of them busy."""


def prepare(run: Callable[[], object]) -> None:
    """Compile what a run of a network will ask for; it runs once, on shapes alone."""
    if torch.cuda.is_available() and find_spec("triton") is not None and mode() != "off":
        compile_ahead(surveyed(run))


def surveyed(run: Callable[[], object]) -> list[Request]:
    """What a run asks for. One that needs values stumbles here, and is met as it comes.

    Of a network's tensors it changes one: the count of batches that a batch norm has seen, which torch works out.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with surveying() as asked, suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        run()
    torch.clear_autocast_cache()  # which would hand the shapes on as weights
    return asked


def compile_ahead(asked: Iterable[Request]) -> None:
    """Compile the kernels of every plan in question; one that does not compile is left to be met later."""
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # which came with Triton 3.5
        return
    with (
        warnings.catch_warnings(),  # Triton's threads leave filters behind
        ThreadPoolExecutor(min(WORKERS, _cores())) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
        compiling_ahead(),
        torch.no_grad(),
    ):
        for each in dict.fromkeys(asked):
            with suppress(Exception):
                _compile(each)


def _compile(asked: Request) -> None:
    for plan in in_question(asked):
        for training in (False, True)[: 1 + asked.training]:
            Trial.random(asked.problem, asked.device, training, asked.bias).run(plan)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
