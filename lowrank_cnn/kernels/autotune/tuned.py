"""Measurements of this device with these versions: a JSON file in the user's cache folder, and lookups.

An entry holds the times of the paths, the fused plan, and whether all plans were tried. Paths are "fused", "torch"
and, for training with several filter groups, "dense": all of them as one conv. Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowrank_cnn.core.cache import JsonCache, cache_folder
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.problem import Problem

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan

# Requests for a choice between the fused kernels and torch, and whether the kernels can run them.


@dataclass(frozen=True)
class Request:
    """A problem on a device. In training, `need_input` asks for the input gradient.

    `bias` is the type of the bias, None for none. It decides which kernels are compiled, not which path is chosen.
    """

    problem: Problem
    device: torch.device
    training: bool = False
    need_input: bool = True
    bias: torch.dtype | None = torch.float32

    @property
    def as_dense(self) -> Request | None:
        """The request of the layer as one dense conv; None if it is one already, or is not trained."""
        several = len(self.problem.groups) > 1
        return replace(self, problem=self.problem.as_dense) if self.training and several else None


@dataclass(frozen=True)
class DensePath:
    """A composite layer run as one dense conv over the taps of all groups: by a plan, or by torch for None."""

    plan: KernelPlan | None


def unsupported(
    problem: Problem, device: torch.device, *, training: bool = False, need_input: bool = True
) -> str | None:
    """Why the fused kernels cannot run a problem on a device, or None if they can."""
    return refusal(Request(problem, device, training, need_input))


def refusal(request: Request) -> str | None:
    """Why the fused kernels cannot run a request, or None if they can."""
    exact = request.problem.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "float32 without TF32" if exact and request.device.type == "cuda" else _unable(request)


@lru_cache(maxsize=4096)
def _unable(request: Request) -> str | None:
    problem = request.problem
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not gpu.is_recent(request.device):
        return "the GPU is older than compute capability 8.0"
    if problem.dtype not in gpu.TYPES:
        return f"{problem.dtype} is not bfloat16, float16 or float32"
    if not plans_of(problem, request.device):
        return "no kernel takes this stride, these channels, these taps or this epilogue"
    return _untrainable(request) if request.training else None


def _untrainable(request: Request) -> str | None:
    from lowrank_cnn.kernels.conv import equivalent, stem, tiled, toeplitz
    from lowrank_cnn.kernels.conv.gradients import has_windows

    problem = request.problem
    if problem.residual or problem.activation not in (None, "relu"):
        return "no gradient for a residual or for this activation"
    inner = equivalent.folded(problem) or problem
    reason = tiled.unsupported(inner) or (f"stride {inner.stride}" if inner.stride != (1, 1) else None)
    gathered = None in (stem.STEM.unsupported(problem), toeplitz.gradient_unsupported(problem))
    first = gathered or has_windows(problem, gpu.capability_of(request.device))
    return None if reason is None or (first and not request.need_input) else f"no gradient for {reason}"


@lru_cache(maxsize=4096)
def plans_of(problem: Problem, device: torch.device) -> tuple[KernelPlan, ...]:
    """The plans of a problem on a device, the default first."""
    from lowrank_cnn.kernels.conv.plans import plans

    return tuple(plans(problem, capability=gpu.capability_of(device)))


LAYOUT = 6
"""The version of an entry's format; files of other versions are ignored."""
PATHS = ("fused", "torch", "dense")
_this_run: dict[str, Any] = {}
"""Entries that hold in this process only."""


class Times(NamedTuple):
    """Milliseconds of one path: in a replayed CUDA graph, and per call from Python."""

    graph: float
    call: float


FAILED = Times(float("inf"), float("inf"))


@lru_cache(maxsize=1)
def entries() -> JsonCache:
    """The entries on disk."""
    path = store_path()
    return JsonCache(path, key=path.stem, valid=_is_entry)


@lru_cache(maxsize=4096)
def key_of(request: Request) -> str:
    """The key of a request's entry. It adds the offsets of the groups, which a problem's text lacks."""
    offsets = ",".join(f"{g.top}:{g.left}" for g in request.problem.groups)
    return f"{request.problem} {offsets} {'training' if request.training else 'inference'}"


def keep(request: Request, entry: dict[str, Any], *, lasting: bool) -> None:
    """Store an entry: on disk if it is `lasting`, else for this process."""
    if not lasting:
        _this_run[key_of(request)] = entry
        return
    entries()[key_of(request)] = entry
    entries().save()


def entry_of(request: Request) -> dict[str, Any] | None:
    """The stored measurement; None if there is none, or if the kernel no longer supports the problem."""
    if request.device.type != "cuda":
        return None
    entry = entries().get(key_of(request)) or _this_run.get(key_of(request))
    if entry is None:
        return None
    from lowrank_cnn.kernels.conv.plans import refusal

    return entry if refusal(plan_in(entry).kernel, request.problem) is None else None


def times_in(entry: dict[str, Any], way: str) -> dict[str, float]:
    """Milliseconds of each path that was measured: `way` is a field of `Times`."""
    return {path: entry[path][way] for path in PATHS if path in entry}


def plan_in(entry: dict[str, Any]) -> KernelPlan:
    """The fused plan of an entry."""
    from lowrank_cnn.kernels.conv.plans import KernelPlan

    return KernelPlan.parse(entry["plan"])


def measured_plan(problem: Problem, device: torch.device, *, tuned: bool = False) -> KernelPlan | None:
    """The measured fused plan of a problem, or only one from a tuning. Training and inference share a forward."""
    entries = (entry_of(Request(problem, device, training)) for training in (False, True))
    return next((plan_in(entry) for entry in entries if entry and (entry["tuned"] or not tuned)), None)


def store_path() -> Path:
    """The file of this device and these versions of torch and Triton."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    name = "-".join([f"kernels{LAYOUT}", device, torch.__version__, triton]).replace(" ", "-").replace("/", "-")
    return cache_folder() / f"{name}.json"


def _is_entry(entry: Any) -> bool:
    """Whether a value from the file is an entry. A plan of another version may not be."""
    try:
        paths = [entry["fused"], entry["torch"], entry.get("dense", entry["torch"])]
        times = [path[way] for path in paths for way in Times._fields]
        named = str(plan_in(entry)) == entry["plan"] and isinstance(entry["tuned"], bool)
        return named and all(type(time) in (int, float) and time >= 0 for time in times)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
