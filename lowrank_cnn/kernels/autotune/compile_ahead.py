"""Compile all kernels of a network before its first step, in parallel.

Compiled one by one as layers first run, the kernels of VGG-11 take half a minute and those of GoogLeNet more than
one. A forward on tensors that have shapes but no memory finds out which kernels the network needs, and Triton then
compiles these on every core.
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
from lowrank_cnn.kernels.autotune.kernel_request import Request
from lowrank_cnn.kernels.autotune.kernel_trial import KernelTrial
from lowrank_cnn.kernels.mode import by_torch, compiling_ahead, surveying

WORKERS = 16
"""The most threads. Compilation holds Python's lock part of the time, so more would not be busy."""


def prepare(run: Callable[[], object]) -> None:
    """Compile the kernels that a run of a network needs; it runs once, on shapes alone."""
    if torch.cuda.is_available() and find_spec("triton") is not None and not by_torch():
        compile_kernels(surveyed(run))


def surveyed(run: Callable[[], object]) -> list[Request]:
    """The requests that a run makes. A run that needs values stops early: its kernels compile when first used.

    The run changes one kind of tensor: the count of batches in a batch norm, which torch computes for real.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with surveying() as asked, suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        run()
    torch.clear_autocast_cache()  # it would return fake tensors as weights later
    return asked


def compile_kernels(asked: Iterable[Request]) -> None:
    """Compile the kernels of every plan in question; a plan that fails to compile is left to its first use."""
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # since Triton 3.5
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with (
        warnings.catch_warnings(),  # Triton's threads leave warning filters behind
        ThreadPoolExecutor(min(WORKERS, cores)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
        compiling_ahead(),
        torch.no_grad(),
    ):
        for request in dict.fromkeys(asked):
            with suppress(Exception):
                _compile(request)


def _compile(request: Request) -> None:
    for plan in in_question(request):
        for training in (False, True)[: 1 + request.training]:
            KernelTrial.random(request, training=training).run(plan)
