"""The fastest network that can be made of a given one: fold, plan, lay out, compile, and measure what is best."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.merging import merge
from lowrank_cnn.deploy.planning import GIVEN, check_ready, plan, silent
from lowrank_cnn.deploy.recorded import Recorded, alike, recorded
from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.system.clock import Sample, measure
from lowrank_cnn.system.errors import LostDeviceError, LowRankError
from lowrank_cnn.system.provenance import note

_FUSED = "fused, channels_last"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Report:
    """Every variant's time, those that failed with the reason, and the name of the fastest."""

    choice: str
    times: dict[str, Sample]
    failed: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


class Optimized(nn.Module):
    """A network for inference in its fastest form; inputs are brought into its memory format.

    Where it was recorded, inputs of that size replay a CUDA graph, without launches; others run as ever. Where it
    was compiled, `network` still is what it was made of: that is what a tracer sees, and an export holds.
    """

    def __init__(self, network: nn.Module, memory_format: torch.memory_format, *, compiled: bool = False) -> None:
        super().__init__()
        self.network, self.memory_format, self.compiled = network, memory_format, compiled
        self.recorded: Recorded | None = None
        self._runs: Callable[[Tensor], Any] | None = None
        self.report: Report
        note(self, optimized=True)
        self.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        if self.recorded is not None and self.recorded.takes(x):
            return self.recorded(x)
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        run = self.network if traced or not self.compiled else self._through_compiler()
        return run(x.contiguous(memory_format=self.memory_format))

    def record(self, x: Tensor) -> None:
        """Keep a run on inputs like this one as a CUDA graph."""
        self.recorded = recorded(self.network, x, self.memory_format)

    def _through_compiler(self) -> Callable[[Tensor], Any]:
        if self._runs is None:
            # Known, but no part: torch makes a module of it, which would have all weights once more.
            self.__dict__["_runs"] = torch.compile(self.network, dynamic=False)
        assert self._runs is not None
        return self._runs

    # A graph is bound to its memory, and what is compiled may hold weights: copies and moves leave both behind.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recorded": None, "_runs": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        self.recorded = self._runs = None
        return super()._apply(fn, recurse)


def optimize(
    model: nn.Module,
    example_input: Tensor,
    *,
    compile: bool = True,
    cache: str | Path | bool = True,
    repeats: int = 11,
    say: Callable[[str], None] | None = None,
) -> Optimized:
    """Fold batch norms, plan every block in both memory formats, compile the best, and keep what is fastest.

    On a GPU layers are fused as well, and CUDA graphs recorded, which inputs of the example's size replay. The
    result is for inference and carries `report`; by its times it is never slower than `model`. What cannot be
    compiled or recorded is left as it is, and the report says why. `say` is told what is under way (`say=print`).
    """
    tell = say or silent
    check_ready(model, example_input)
    folded = merge(model, chains=False, example_input=example_input)
    variants = {GIVEN: Optimized(copy.deepcopy(model), torch.preserve_format)}
    for name, layout in LAYOUTS.items():
        laid_out = copy.deepcopy(folded).to(memory_format=layout)  # type: ignore[call-overload]
        images = example_input.contiguous(memory_format=layout)
        planned = plan(laid_out, images, cache=cache, repeats=repeats, say=_after(f"planned, {name}", tell))
        variants[f"folded, {name}"] = Optimized(laid_out, layout)
        variants[f"planned, {name}"] = Optimized(planned, layout)
    failed: dict[str, str] = {}

    def attempt(name: str, make: Callable[[], Optimized]) -> None:
        tell(name)
        try:
            variants[name] = make()
        except LostDeviceError:
            raise
        except Exception as error:  # no compiler, say, or a network that waits for the device and has no graph
            failed[name] = str(error).strip().partition("\n")[0]

    if example_input.is_cuda:
        attempt(_FUSED, lambda: _fused(folded, example_input))
        if _FUSED in variants:
            attempt("fused, recorded", lambda: _recorded(variants[_FUSED], example_input))
        attempt(
            "planned, recorded", lambda: _recorded(_planned(folded, example_input, cache, repeats), example_input)
        )
    if compile:
        tell(f"{len(variants)} variants in turns")
        times = _measured(variants, example_input, repeats)
        eager = {n: time for n, time in times.items() if variants[n].recorded is None and n != _FUSED}
        for name in dict.fromkeys([_fastest(eager), "folded, channels_last", *({_FUSED} & set(variants))]):
            attempt(f"{name}, compiled", lambda name=name: _compiled(variants[name], example_input))
    tell(f"{len(variants)} variants in turns")
    times = _measured(variants, example_input, repeats)
    best = variants[_fastest(times)]
    best.report = Report(_fastest(times), times, failed)
    note(best, input_size=tuple(example_input.shape[1:]))
    return best


def _after(name: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: tell(f"{name}: {text}")


@torch.no_grad()
def _fused(folded: nn.Module, x: Tensor) -> Optimized:
    """Every layer that the kernels know by them, which the dispatch chooses, whatever a plan would make of it.

    A forward written by hand may call its layers in an order of its own, which fused ones do not follow.
    """
    from lowrank_cnn.kernels.fuse import freeze

    variant = Optimized(freeze(_channels_last(folded)), torch.channels_last)
    if not alike(variant(x), folded(x)):
        raise LowRankError("the layers are not called one after the other: fused, their results differ.")
    return variant


def _planned(folded: nn.Module, x: Tensor, cache: str | Path | bool, repeats: int) -> Optimized:
    """Planned by what blocks take in a CUDA graph."""
    images = x.contiguous(memory_format=torch.channels_last)
    with for_graphs():
        planned = plan(_channels_last(folded), images, cache=cache, repeats=repeats)
    return Optimized(planned, torch.channels_last)


def _channels_last(network: nn.Module) -> nn.Module:
    return copy.deepcopy(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _recorded(variant: Optimized, x: Tensor) -> Optimized:
    """Another one, kept as a CUDA graph, its kernels chosen by what they take in one."""
    variant = Optimized(variant.network, variant.memory_format)
    variant.record(x)
    return variant


def _compiled(variant: Optimized, x: Tensor) -> Optimized:
    """Another one, through torch.compile, run once so that it fails here if it does."""
    variant = Optimized(variant.network, variant.memory_format, compiled=True)
    variant(x)
    return variant


def _measured(variants: dict[str, Optimized], x: Tensor, repeats: int) -> dict[str, Sample]:
    runs = {name: lambda v=variant: v(x) for name, variant in variants.items()}
    return measure(runs, repeats=repeats, cuda=x.is_cuda)


def _fastest(times: dict[str, Sample]) -> str:
    return min(times, key=lambda name: times[name].ms)
