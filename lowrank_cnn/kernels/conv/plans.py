"""Plans: a kernel for a problem, with its tile. `plans` lists those worth measuring, the default first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowrank_cnn.kernels.conv import equivalent, hopper_plan, stem, tiled, toeplitz
from lowrank_cnn.kernels.problem import OVERLAPPING, ForwardKernel, Problem

KERNELS: dict[str, ForwardKernel] = {
    "window": hopper_plan.WINDOW,
    "overlap": hopper_plan.OVERLAP,
    "hopper": hopper_plan.HOPPER,
    "toeplitz": toeplitz.TOEPLITZ,
    "stem": stem.STEM,
    "enclosed": equivalent.ENCLOSED,
    "tiled": tiled.KERNEL,
    "folded": equivalent.FOLDED,
}
"""The forward kernels by name, in the order of preference. A new kernel is one more row."""


@lru_cache(maxsize=4096)
def refusal(kernel: str, problem: Problem) -> str | None:
    """Why a kernel cannot run a problem, or None if it can."""
    if not problem.can_pool_first:
        return "a pool behind a residual or behind an activation that falls"
    if problem.pool == OVERLAPPING and kernel != "overlap":
        return "a pool of overlapping windows"
    return KERNELS[kernel].unsupported(problem)


@dataclass(frozen=True)
class KernelPlan:
    """A kernel by name and its tile. As text: "tiled-p128-f64-d64-w4-s3", the tile's fields in their order."""

    kernel: str
    tile: Any

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> KernelPlan:
        """The plan of a text."""
        kernel, *sizes = text.split("-")
        return KernelPlan(kernel, KERNELS[kernel].tile(*(int(size[1:]) for size in sizes)))

    def __str__(self) -> str:
        names = (field.name[0] for field in fields(self.tile))
        return "-".join([self.kernel, *(f"{n}{v}" for n, v in zip(names, astuple(self.tile), strict=True))])


def plans(problem: Problem, *, capability: tuple[int, int] = (0, 0)) -> list[KernelPlan]:
    """Plans for a problem on a device of a compute capability, the default first."""
    best = preset(problem, capability)
    found = [KernelPlan.parse(best)] if best else []
    for name, kernel in KERNELS.items():
        if refusal(name, problem) is None:
            tiles = kernel.tiles(problem, capability)
            found += [KernelPlan(name, tile) for tile in tiles]
            if tiles and kernel.decides:
                break
    # Shapes of presets are stored without padding: a preset's kernel may refuse this problem.
    return [plan for plan in dict.fromkeys(found) if refusal(plan.kernel, problem) is None]


def shortlist(found: Sequence[KernelPlan]) -> list[KernelPlan]:
    """The plans that are measured without tuning: the default, or the first of each kernel.

    The latter if a plan multiplies by zeros, which pays only sometimes.
    """
    if not {"enclosed", "toeplitz"} & {plan.kernel for plan in found}:
        return [found[0]]
    return list({plan.kernel: plan for plan in reversed(found)}.values())[::-1]


# The fastest plans measured so far, by compute capability and shape: `auto` uses these until it is tuned.
#
# `benchmarks/gpu_kernels.py --presets` writes the table from its results.

LEAST_BATCH = 16
"""The smallest batch that a preset is used for: presets were measured at large batches, in 16 bits."""


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(Path(__file__).with_name("presets.json").read_text())


def preset(problem: Problem, capability: tuple[int, int], what: str = "forward") -> str | None:
    """The stored plan of a shape as text, or None; `what` is "forward" or "input" for the input gradient."""
    if problem.batch < LEAST_BATCH or problem.dtype.itemsize != 2:
        return None
    return table().get(f"{capability[0]}.{capability[1]}", {}).get(shape_of(problem), {}).get(what)


def shape_of(problem: Problem) -> str:
    """A problem without batch, residual and activation, which do not decide which tiles suit it."""
    groups = "+".join(f"{g.height}x{g.width},{g.filters}" for g in problem.groups)
    pool = ",pool" if problem.pool else ""
    return f"{problem.channels}x{problem.height}x{problem.width} {groups} /{problem.stride[0]}{pool}"
