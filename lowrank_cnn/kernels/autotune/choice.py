"""Choose between the fused kernels and torch, by support and by times measured on this device.

In training there is a third path: all filter groups as one dense conv, with zeros around their taps. Fused or by
torch, whichever is faster, it takes as long as the dense layer that the composite replaces.

Each path has two times. The device's own time decides inside CUDA graphs. Elsewhere the time of a call from Python
decides, in which launches of small kernels cost more than their work. During a graph capture or a trace of
torch.compile nothing is measured: the stored choice applies, or the default. A plan is never chosen unless its
results agree with torch's.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.core.search import Key, Search
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.autotune import tuned
from lowrank_cnn.kernels.autotune.trial import OUT_OF_MEMORY, WRONG, KernelTrial, Path, mismatch, times
from lowrank_cnn.kernels.autotune.tuned import FAILED, DensePath, Request, Times, entry_of, plans_of, refusal
from lowrank_cnn.kernels.device import asked_for_dense, by_torch, is_for_graphs, is_tuning, mode
from lowrank_cnn.kernels.problem import CallOptions, Problem, pose

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan

DENSE = "dense"
"""Used instead of a plan's text: the layer runs as one dense conv, which has its own choice."""
DECISIVE_RATIO = 2
"""If torch without cuDNN's search takes this many times as long as another path, the search is skipped."""
LARGE = 1e8
"""MACs from which a layer is expected to hide the cost of a launch."""


@dataclass(frozen=True)
class Choice:
    """The path of a problem, and why: a fused plan, one dense conv, or torch."""

    why: str
    plan: KernelPlan | None = None
    dense: bool = False

    @property
    def fused(self) -> bool:
        return self.plan is not None


def plan_text(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    asked: tuple,
    training: bool,
    need_input: bool,
    bias: torch.dtype | None = torch.float32,
) -> str | None:
    """From the shapes of input and weights and the fields of `CallOptions` to a plan, `DENSE`, or None (torch)."""
    problem = pose(shapes[0], shapes[1:], dtype, **CallOptions(*asked)._asdict())
    chosen = choose(problem, device, training=training, need_input=need_input, bias=bias)
    return str(chosen.plan) if chosen.fused else DENSE if chosen.dense else None


def choose(
    problem: Problem,
    device: torch.device,
    *,
    training: bool,
    need_input: bool = True,
    bias: torch.dtype | None = torch.float32,
) -> Choice:
    """The path of a problem under the current mode; in training, `need_input` asks for the input gradient."""
    return _choose(Request(problem, device, training, need_input, bias))


def _choose(request: Request) -> Choice:
    if by_torch():
        return Choice("mode dense: in training as one dense conv" if asked_for_dense() else "switched off")
    if reason := refusal(request):
        return Choice(reason)
    if (noted := gpu.survey()) is not None:
        noted.extend(_to_compile(request))
        return Choice("only surveyed")
    if mode() == "on":
        problem, device = request.problem, request.device
        return Choice("forced", tuned.measured_plan(problem, device) or plans_of(problem, device)[0])
    return (None if _to_tune(request) else _stored(request)) or _measured(request) or _default(request)


def in_question(request: Request) -> list[KernelPlan]:
    """The plans that a choice would run: all if it tunes, else the stored one or the default."""
    if mode() == "on" or not (_to_tune(request) or _stored(request) is None):
        plan = _choose(request).plan
        return [plan] if plan else []
    return _candidates(request)


def fastest(problem: Problem, device: torch.device, *, training: bool, need_input: bool = True) -> float | None:
    """Milliseconds of the path that a problem takes, measured now if possible; None if unknown."""
    request = Request(problem, device, training, need_input)
    _choose(request)
    entry = entry_of(request)
    return min(tuned.times_in(entry, _way()).values()) if entry else None


def explain(problem: Problem, device: torch.device | str = "cuda", *, training: bool = False) -> str:
    """The path of a problem and why, in one line; nothing is measured."""
    request = Request(problem, torch.device(device), training, need_input=problem.channels > 4)
    decided = mode() != "auto" or refusal(request)
    choice = _choose(request) if decided else _stored(request) or _default(request)
    if choice.dense:
        inner = explain(problem.as_dense, device, training=training)
        return f"{problem}: as one dense conv ({choice.why}), {inner}"
    return f"{problem}: {f'fused {choice.plan}' if choice.fused else 'torch'} ({choice.why})"


def _default(request: Request) -> Choice:
    """The choice without times: fused on Hopper for large layers, else torch."""
    if gpu.capability_of(request.device)[0] == 9 and request.problem.macs > LARGE:
        return Choice("not measured; the default for large layers", plans_of(request.problem, request.device)[0])
    return Choice("not measured; the default for small layers and other GPUs")


def _measured(request: Request) -> Choice | None:
    """Compare and time all paths now and store the times; None in a capture or a trace, or if nothing runs."""
    capturing = request.device.type != "cuda" or torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        return None
    plan, tried = _fastest(request)
    builders: dict[str, Callable[[], Path]] = {"fused": lambda: plan}
    if whole := request.as_dense:
        builders["dense"] = lambda: DensePath(_choose(whole).plan)
    taken, failed = _search(request, builders)
    torch_times = _by_torch(request, Times(*map(min, zip(FAILED, *taken.values(), strict=True))))
    wrong = failed.get("fused") == WRONG  # a wrong plan must not become the default
    if torch_times in (None, FAILED) and taken.get("fused", FAILED) == FAILED and not wrong:
        return None
    entry: dict[str, Any] = {path: taken.get(path, FAILED)._asdict() for path in builders}
    entry |= {"torch": (torch_times or FAILED)._asdict(), "plan": str(plan), "tuned": is_tuning()}
    # If memory ran out, this run does without the path, and a later run measures again.
    tuned.keep(request, entry, lasting=tried and torch_times is not None and OUT_OF_MEMORY not in failed.values())
    return _choice(entry)


def _search(
    request: Request, builders: Mapping[Any, Callable[[], Path]]
) -> tuple[dict[Any, Times], dict[Any, str]]:
    """The times of the paths whose results are torch's, and why others were left out."""
    search: Search[Any, Path] = Search(partial(mismatch, request))
    for key, build in builders.items():
        search.attempt(key, build)

    def clock(paths: Mapping[Key, Path]) -> dict[Key, Times]:
        found = {key: times(request, path) for key, path in paths.items()}
        search.failed |= {key: OUT_OF_MEMORY for key, taken in found.items() if taken is None}
        return {key: taken for key, taken in found.items() if taken is not None}

    return search.times(clock), search.failed


def _to_compile(request: Request) -> list[Request]:
    """The requests whose kernels a choice would run: also those of the dense conv, unless it is known to lose."""
    stored = _stored(request)
    whole = request.as_dense if mode() == "auto" and (stored is None or stored.dense) else None
    return [request] if whole is None or refusal(whole) else [request, whole]


def _by_torch(request: Request, others: Times) -> Times | None:
    """The times of torch's own path. cuDNN's search takes seconds per layer: only if it may decide."""
    if torch.backends.cudnn.benchmark and request.problem.dtype.itemsize == 2:
        with _without_search():
            found = times(request, None)
        if found is None or all(DECISIVE_RATIO * other < own for other, own in zip(others, found, strict=True)):
            return found
    return times(request, None)


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    """Run convs without cuDNN's search, and without effect on later convs with it.

    Torch remembers the algorithm of a shape, whether it was searched for or not, under a key that includes the
    TF32 setting. That setting means nothing to 16-bit convs, so flipping it keeps the two apart.
    """
    cudnn = torch.backends.cudnn
    searches, exact = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32 = False, not exact
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = searches, exact


def _fastest(request: Request) -> tuple[KernelPlan, bool]:
    """The fastest correct candidate; and whether memory sufficed to try all of them."""
    plans = _candidates(request)
    if len(plans) == 1:
        return plans[0], True
    if (found := tuned.measured_plan(request.problem, request.device, tuned=True)) is not None:
        return found, True
    inference = replace(request, training=False)
    taken, failed = _search(inference, {plan: lambda plan=plan: plan for plan in plans})
    best = min(taken, key=lambda plan: taken[plan].graph, default=plans[0])
    return best, OUT_OF_MEMORY not in failed.values()


def _candidates(request: Request) -> list[KernelPlan]:
    """The plans to measure: all while tuning, else the default and its likely rivals."""
    from lowrank_cnn.kernels.conv.plans import shortlist

    plans = list(plans_of(request.problem, request.device))
    return plans if is_tuning() else shortlist(plans)


def _to_tune(request: Request) -> bool:
    return is_tuning() and not (entry_of(request) or {}).get("tuned")


def _stored(request: Request) -> Choice | None:
    entry = entry_of(request)
    return _choice(entry) if entry else None


def _choice(entry: dict[str, Any]) -> Choice:
    found = tuned.times_in(entry, _way())
    why = f"measured, in a {_way()}: " + ", ".join(f"{path} {ms:.3f} ms" for path, ms in found.items())
    best = min(("torch", "fused", "dense"), key=lambda path: found.get(path, float("inf")))  # torch, if equal
    return Choice(why, tuned.plan_in(entry) if best == "fused" else None, best == "dense")


def _way() -> str:
    return "graph" if is_for_graphs() else "call"


# Compile all kernels of a network before its first step, in parallel.
#
# Compiled one by one as layers first run, the kernels of VGG-11 take half a minute and those of GoogLeNet more
# than one. A forward on tensors that have shapes but no memory finds out which kernels the network needs, and
# Triton then compiles these on every core.

WORKERS = 16
"""The most threads. Compilation holds Python's lock part of the time, so more would not be busy."""


def prepare(run: Callable[[], object]) -> None:
    """Compile the kernels that a run of a network needs; it runs once, on shapes alone."""
    if torch.cuda.is_available() and find_spec("triton") is not None and mode() != "off":
        compile_kernels(surveyed(run))


def surveyed(run: Callable[[], object]) -> list[Any]:
    """The requests that a run makes. A run that needs values stops early: its kernels compile when first used.

    They are of type `Request` or `DepthwiseCall`. The run changes one kind of tensor: the count of batches in a
    batch norm, which torch computes for real.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with gpu.surveying() as asked, suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        run()
    torch.clear_autocast_cache()  # it would return fake tensors as weights later
    return asked


def compile_kernels(asked: Iterable[Any]) -> None:
    """Compile the kernels of every candidate; a plan that fails to compile is left to its first use."""
    import triton

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with (
        warnings.catch_warnings(),  # Triton's threads leave warning filters behind
        ThreadPoolExecutor(min(WORKERS, cores)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
        gpu.compiling_ahead(),
        torch.no_grad(),
    ):
        for request in dict.fromkeys(asked):
            with suppress(Exception):
                _compile(request) if isinstance(request, Request) else request.compile()


def _compile(request: Request) -> None:
    for plan in in_question(request):
        for training in (False, True)[: 1 + request.training]:
            KernelTrial.random(replace(request, training=training)).run(plan)
