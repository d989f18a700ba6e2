"""The fastest plans measured so far, by compute capability and shape: `auto` uses these until it is tuned.

`benchmarks/gpu_kernels.py --presets` writes the table from its results.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from lowrank_cnn.kernels.problem import Problem

PATH = Path(__file__).with_suffix(".json")
LEAST_BATCH = 16
"""The smallest batch that a preset is used for: presets were measured at large batches, in 16 bits."""


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(PATH.read_text())


def preset(problem: Problem, capability: tuple[int, int], what: str = "forward") -> str | None:
    """The stored plan of a shape as text, or None; `what` is "forward" or "input" for the input's gradient."""
    if problem.batch < LEAST_BATCH or problem.dtype.itemsize != 2:
        return None
    return table().get(f"{capability[0]}.{capability[1]}", {}).get(shape_of(problem), {}).get(what)


def shape_of(problem: Problem) -> str:
    """A problem without batch, residual and activation, which do not decide which tiles suit it."""
    groups = "+".join(f"{g.height}x{g.width},{g.filters}" for g in problem.groups)
    pool = ",pool" if problem.pool else ""
    return f"{problem.channels}x{problem.height}x{problem.width} {groups} /{problem.stride[0]}{pool}"
