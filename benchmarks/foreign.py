"""Networks of other libraries: every transform on each of them, and the error of its result.

    python -m benchmarks.foreign [--only resnet,unet] [--steps planned,optimised] [--limit 300]
                                 [--out benchmarks/results/foreign.json]

The networks are those of `benchmarks.foreign_networks`, small and with random weights. Each one is counted,
converted, decomposed, merged, planned, optimised and exported. A transform either gives the original's results
(the table shows the relative error), or refuses with a sentence. A raw error or a wrong result is a bug, and the
command then exits with 1.

Each network runs in a process of its own, which is stopped after `--limit` seconds of processor time. With
`--out`, the record is written after each network; rows and steps that are not run again stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import lowrank_cnn as lr
from benchmarks.foreign_networks import PACKAGES, Foreign, networks
from lowrank_cnn.core.compare import random_like
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.files import read_json
from lowrank_cnn.core.text import text_table

TOLERANCE = 2e-3
"""Relative to the largest value: kernels add up in other orders, over networks of a hundred layers."""
SHARE = 0.8
"""Of the MACs, for `decompose`."""
STEPS = ("counted", "converted", "decomposed", "merged", "planned", "optimised", "exported")
_REFUSED, _WRONG, _RAW, _LATE, _ABSENT = "refused", "WRONG", "RAW ERROR", "TOO LATE", "not built"


@dataclass
class Outcome:
    """The results of one network: per transform a relative error, or why there is none."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        bad = (_WRONG, _RAW, _LATE, _ABSENT)
        return [f"{what}: {text}" for what, text in self.cells.items() if text.startswith(bad)]


def examine(foreign: Foreign, *, steps: tuple[str, ...] = STEPS) -> Outcome:
    """Run each transform on one network."""
    outcome, began = Outcome(foreign.name), time.process_time()
    torch.manual_seed(0)
    try:
        model, inputs = foreign.build().eval(), foreign.inputs()
        with torch.no_grad():
            right = model(*inputs)
    except Exception as error:
        outcome.cells["built"] = f"{_ABSENT}: {_first_line(error)}"
        return outcome
    x: Any = inputs[0] if len(inputs) == 1 else inputs
    transforms: dict[str, Callable[[], str]] = {
        "counted": lambda: _counted(model, inputs),
        "converted": lambda: _converted(
            _by_first_scheme(model, lr.convert, ("lr", "channel(m=0.25)")), model, inputs, right
        ),
        "decomposed": lambda: _converted(
            _by_first_scheme(model, lr.decompose, ("separable", "channel"), macs=SHARE, input_size=inputs),
            model,
            inputs,
            right,
        ),
        "merged": lambda: _merged(lr.merge(model, example_input=x), inputs, right),
        "planned": lambda: _planned(lr.plan(model, x, cache=False, repeats=3), inputs, right),
        "optimised": lambda: _error(lr.optimize(model, x, compile=False, cache=False, repeats=3), inputs, right),
        "exported": lambda: _exported(model, inputs, right),
    }
    for what in steps:
        outcome.cells[what] = _answer(transforms[what])
    outcome.seconds = round(time.process_time() - began, 1)
    return outcome


def _by_first_scheme(model: nn.Module, transform: Any, schemes: tuple[str, ...], **options: Any) -> nn.Module:
    """Transform by the first scheme that takes a layer of the network and meets the budget."""
    *others, last = schemes
    for scheme in others:
        try:
            return transform(model, scheme, **options)
        except lr.LowRankError:
            continue
    return transform(model, last, **options)


def _answer(run: Callable[[], str]) -> str:
    try:
        return run()
    except lr.LowRankError as error:
        return f"{_REFUSED}: {_first_line(error)}"
    except Exception as error:
        return f"{_RAW} {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160]


def _error(network: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    """The largest error of any output, relative to that output; NaN is wrong."""
    with torch.no_grad():
        ours = network(*inputs)
    worst = 0.0
    for a, b in zip(_tensors(ours), _tensors(right), strict=True):
        if a.shape != b.shape:
            return f"{_WRONG} shape {tuple(a.shape)}"
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
        worst = error if not error <= worst else worst
    return f"{worst:.0e}" if worst <= TOLERANCE else f"{_WRONG} by {worst:.2g}"


def _tensors(outputs: Any) -> list[Tensor]:
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _counted(model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Our count against torch's own counter over a real run.

    That counter does not know the fused attention of CPUs, so attention runs as matrix products here.
    """
    found = lr.count(model, inputs)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    flops = counter.get_total_flops()
    return "equal" if 2 * found.macs == flops else f"{_WRONG} {2 * found.macs} / {flops}"


def _converted(new: nn.Module, model: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    """How many layers changed. The network is a different one; only the shapes of its outputs must equal the
    original's.

    They may have others if the original's own shapes depend on values, such as the number of points it finds.
    """
    with torch.no_grad():
        ours, other = new(*inputs), model(*(random_like(value, seed=1) for value in inputs))
    shapes = [[tensor.shape for tensor in _tensors(outputs)] for outputs in (ours, right, other)]
    conversion = lr.notes(new).conversion
    assert conversion is not None
    right_shapes = shapes[0] == shapes[1] or shapes[1] != shapes[2]
    return f"{len(conversion.changed)} layers" if right_shapes else f"{_WRONG} shapes"


def _merged(new: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    rows = lr.notes(new).merging
    folded = sum(row.error is not None for row in rows)
    why = next((f": {row.reason}" for row in rows if row.error is None), "")
    return f"{_error(new, inputs, right)}, {folded} of {len(rows)} folded{why}"


def _planned(new: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    found = lr.notes(new).plan
    assert found is not None
    why = f": {found.reason}" if found.reason else ""
    return f"{_error(new, inputs, right)}, {len(found.decisions)} blocks{why}"


def _exported(model: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    """Through ONNX Runtime, for any batch; a network that torch.export binds to its batch, for that batch."""
    with tempfile.TemporaryDirectory() as folder:
        path, note = Path(folder) / "net.onnx", ""
        try:
            lr.export(model, path, example_input=inputs)
        except lr.LowRankError:
            lr.export(model, path, example_input=inputs, dynamic=())
            note = ", fixed batch"
        return _error(lr.load(path), inputs, right) + note


def _alone(foreign: Foreign, limit: int, steps: tuple[str, ...]) -> Outcome:
    """Examine a network in a process of its own, for at most `limit` seconds of processor time."""
    context = multiprocessing.get_context("fork")  # packages are imported once, here
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        sender.send(examine(foreign, steps=steps))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Outcome(foreign.name, {"built": f"{_LATE}: stopped by signal {-(process.exitcode or 0)}"})
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    parser.add_argument("--steps", default=",".join(STEPS), help="transforms to run, comma-separated")
    parser.add_argument("--limit", type=int, default=300, help="seconds of processor time for one network")
    parser.add_argument("--out", type=Path, help="where to write the record")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows: dict[str, Any] = {}
    commits: list[str] = []
    if options.out and options.out.exists():
        earlier = read_json(options.out)
        rows, commits = {row["name"]: row for row in earlier["rows"]}, [earlier["environment"]["commit"]]
    outcomes, steps = [], tuple(options.steps.split(","))
    for foreign in networks():
        if any(part in foreign.name for part in options.only.split(",")):
            outcomes.append(_alone(foreign, options.limit, steps))
            print(f"{foreign.name} ({outcomes[-1].seconds:.0f} s): {outcomes[-1].cells}", flush=True)
            row = asdict(outcomes[-1])
            if steps != STEPS and foreign.name in rows:
                earlier = rows[foreign.name]
                row |= {"cells": earlier["cells"] | row["cells"], "seconds": earlier["seconds"]}
            rows[foreign.name] = row
            if options.out:
                packages = {name: version(name) for name in PACKAGES}
                where = environment() | packages
                where["commit"] = " and ".join(
                    dict.fromkeys([*commits, str(where["commit"])])
                )  # rows of both stay
                about = {"kind": "foreign", "environment": where}
                options.out.write_text(json.dumps(about | {"rows": list(rows.values())}, indent=1) + "\n")
    lines = [(o.name, *(o.cells.get(what, "").partition(":")[0] for what in ("built", *STEPS))) for o in outcomes]
    print(text_table(("network", "built", *STEPS), lines))
    faults = [f"{outcome.name}: {fault}" for outcome in outcomes for fault in outcome.faults]
    print(f"{len(outcomes)} networks, {len(faults)} faults", *faults, sep="\n  ")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
