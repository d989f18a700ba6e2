"""How `lowrank train` trains: by `fit`, by `learn_shapes`, or with shapes that were learned before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.cli.show import console
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.processes import first_process

if TYPE_CHECKING:
    from lowrank_cnn.method.scheme import Scheme
    from lowrank_cnn.method.settling import LearnedShapes
    from lowrank_cnn.train.record import Record

Training = Callable[..., "Record"]


def training_of(
    scheme: str | None, shapes: Path | None, *, macs: float | None, latency: float | None
) -> tuple[str | None, Training]:
    """The scheme that the network is built by, and the function that trains it; wrong options are refused."""
    from lowrank_cnn.method.budget import Budget
    from lowrank_cnn.method.scheme import parse_scheme
    from lowrank_cnn.method.settling import load_shapes
    from lowrank_cnn.train.fitting import fit

    budget = Budget.of(macs=macs, latency=latency)
    learned = parse_scheme(scheme) if scheme is not None and scheme.strip().startswith("learned") else None
    if shapes is not None and scheme is not None:
        raise LowRankError("give --scheme or --shapes, not both: learned shapes are a scheme for every layer.")
    if learned is None and budget is not None:
        raise LowRankError(f"--{budget.kind} is for learned shapes: add --scheme 'learned(kx1, 1xk, 1x1, kxk)'.")
    if learned is not None and budget is None:
        raise LowRankError("learned shapes need a budget: give --macs or --latency, like --macs 0.4.")
    if learned is not None:
        return None, partial(_learn, learned, {"macs": macs, "latency": latency})
    return (scheme, fit) if shapes is None else (None, partial(_train_again, load_shapes(shapes)))


def _learn(scheme: Scheme, budget: dict[str, float | None], network: Any, *given: Any, **options: Any) -> Record:
    """Learn shapes. The result also has the time that was measured, as a share of the dense network's."""
    from lowrank_cnn.shapes.learning_shapes import learn_shapes

    found = learn_shapes(network, *given, shapes=scheme, **budget, **options)
    if options.get("progress") and first_process():
        shares = {"MACs": found.macs, "time": found.time}
        told = ", ".join(f"{share:.3f} of the {of}" for of, share in shares.items() if share is not None)
        console.print(f"{found.shapes}\n{told}", markup=False, highlight=False)
    timed = {} if found.time is None else {"time": found.time}
    return replace(found.record, result=found.record.result | timed)


def _train_again(shapes: LearnedShapes, network: Any, *given: Any, **options: Any) -> Record:
    from lowrank_cnn.train.fitting import fit

    return fit(shapes.apply(network).train(), *given, **options)
