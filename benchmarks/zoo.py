"""Convert, count and run every convolutional network of timm and torchvision, and name what fails.

    python benchmarks/zoo.py --scheme lr-join --jobs 12 --budget 540

Each network is built without trained weights, converted, counted before and after, and both are run on one image.
Networks without spatial convolutions (transformers, mixers) are listed as such. A network that fails, hangs or
ends its process does no harm to the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST = 300_000_000
"""Networks of more parameters are not built: they say nothing that their smaller brothers do not."""


def names(family: str) -> list[str]:
    """Every classification network of a family, as `family:NAME`."""
    if family == "timm":
        return [f"timm:{name}" for name in import_module("timm").list_models()]
    models = import_module("torchvision.models")
    return [f"torchvision:{name}" for name in models.list_models(module=models)]


def examine(text: str, scheme: str, largest: int) -> dict[str, Any]:
    """One network: MACs before and after, layers changed, and whether it runs; or why not."""
    import torch

    torch.set_num_threads(1)
    row: dict[str, Any] = {"network": text}
    start = time.monotonic()
    try:
        row |= _examined(text, scheme, largest)
    except Exception as error:
        row |= {"outcome": "failed", "why": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    return row | {"seconds": round(time.monotonic() - start, 2)}


def _examined(text: str, scheme: str, largest: int) -> dict[str, Any]:
    import torch

    from lowrank_cnn.convert import conversion_costs, convert
    from lowrank_cnn.errors import LowRankError

    if (weight := _parameters(text)) > largest:
        return {"outcome": "not built", "why": f"{weight / 1e6:.0f}M parameters"}
    network, size = _build(text)
    try:
        new = convert(network, scheme)
    except LowRankError as nothing:
        return {"outcome": "nothing to convert", "why": str(nothing)}
    total = conversion_costs(network, new, size)[-1]
    image = torch.randn(1, *size)
    with torch.no_grad():
        shapes = [_shape(net.eval()(image)) for net in (network, new)]
    if shapes[0] != shapes[1]:
        return {"outcome": "failed", "why": f"gives {shapes[1]} in place of {shapes[0]}"}
    report: Any = new.conversion
    return {
        "outcome": "converted",
        "input": list(size),
        "macs_before": total.macs_before,
        "macs_after": total.macs_after,
        "changed": len(report.changed),
        "kept": dict(Counter(row.reason for row in report.kept)),
    }


def _parameters(text: str) -> int:
    """How many parameters a network has, without building them; 0 for one that can only be built for good."""
    import torch

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in _build(text)[0].parameters())
    except Exception:
        return 0


def _build(text: str) -> tuple[Any, tuple[int, ...]]:
    from lowrank_cnn.cli.source import find_model

    source = find_model(text)
    size = source.size((3, 299, 299) if text == "torchvision:inception_v3" else None)
    return source.network.eval(), size


def _shape(output: Any) -> Any:
    """Shapes of whatever a network gives."""
    if hasattr(output, "shape"):
        return tuple(output.shape)
    values = output.values() if hasattr(output, "values") else output
    return (
        [_shape(value) for value in values]
        if isinstance(values, list | tuple) or hasattr(output, "values")
        else ()
    )


def examine_all(texts: list[str], scheme: str, jobs: int, largest: int, deadline: float) -> list[dict[str, Any]]:
    """Spread the networks over processes; what a process that ended leaves goes to a new pool of half the size."""
    rows, left = [], texts
    while left and jobs:
        done, left = _in_pool(left, scheme, jobs, largest, deadline)
        rows, jobs = rows + done, jobs // 2
    rows += [{"network": text, "outcome": "failed", "why": "its process ended"} for text in left]
    return sorted(rows, key=lambda row: row["network"])


def _in_pool(
    texts: list[str], scheme: str, jobs: int, largest: int, deadline: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of what was finished, and the names that a broken pool left."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    waiting: dict[Future, str] = {pool.submit(examine, text, scheme, largest): text for text in texts}
    rows, broken = [], []
    while waiting and time.monotonic() < deadline:
        done, _ = wait(waiting, timeout=max(0.1, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        for future in done:
            text = waiting.pop(future)
            try:
                rows.append(future.result())
            except BrokenProcessPool:
                broken.append(text)
    rows += [{"network": text, "outcome": "not reached"} for text in waiting.values()]
    for process in list((pool._processes or {}).values()):
        process.terminate()  # those that hang; the others are done
    pool.shutdown(wait=False, cancel_futures=True)
    return rows, broken


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["outcome"] == "converted":
            ratio = row["macs_after"] / max(1, row["macs_before"])
            print(f"{row['network']:60} {row['macs_before'] / 1e9:8.2f}G {ratio:6.3f} {row['changed']:4} layers")
    for row in rows:
        if row["outcome"] == "failed":
            print(f"FAILED {row['network']}: {row['why']}")
    print(dict(Counter(row["outcome"] for row in rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["torchvision", "timm"], choices=["torchvision", "timm"])
    parser.add_argument("--scheme", default="lr-join")
    parser.add_argument("--match", default="", help="only networks whose name contains this")
    parser.add_argument("--jobs", type=int, default=max(1, (multiprocessing.cpu_count() or 2) - 2))
    parser.add_argument("--largest", type=int, default=LARGEST, help="parameters of the largest network built")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zoo.json")
    options = parser.parse_args()
    from lowrank_cnn.environment import environment

    deadline = time.monotonic() + options.budget
    texts = [name for family in options.families for name in names(family) if options.match in name]
    rows = examine_all(texts, options.scheme, options.jobs, options.largest, deadline)
    show(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(), "scheme": options.scheme, "networks": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
