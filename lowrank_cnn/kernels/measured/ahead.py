"""Compile the kernels of a network ahead of its first step, side by side.

Met one after another, the layers of a network would each compile their kernels, and wait: for VGG-11 half a
minute, for GoogLeNet more than one. What they will ask for is known once a forward has run by torch's own
operations; Triton then compiles all of it on every core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

import torch

from lowrank_cnn.kernels.measured.choice import in_question
from lowrank_cnn.kernels.measured.support import Asked
from lowrank_cnn.kernels.measured.trial import Trial
from lowrank_cnn.kernels.mode import compiling_ahead, surveying

WORKERS = 32
"""At most; the part of a compilation that holds Python's lock leaves no more of them busy."""


def prepare(run: Callable[[], object]) -> None:
    """Compile what a run of a network will ask for; the function is called once, and must leave no trace."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # this run is for its shapes alone
    try:
        with surveying() as asked:
            run()
    finally:
        torch.backends.cudnn.benchmark = searches
    compile_ahead(asked)


def compile_ahead(asked: Iterable[Asked]) -> None:
    """Compile the kernels of every plan in question; one that does not compile is left to be met later."""
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # which came with Triton 3.5
        return
    with (
        ThreadPoolExecutor(min(WORKERS, _cores())) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
        compiling_ahead(),
    ):
        for each in dict.fromkeys(asked):
            for plan in in_question(each):
                with suppress(Exception), torch.no_grad():
                    for training in (False, True)[: 1 + each.training]:
                        Trial.random(each.problem, each.device, training).run(plan)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
