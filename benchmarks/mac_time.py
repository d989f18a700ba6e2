"""Whether multiply-accumulates tell the time of a layer on a CPU: `vgg11-gmp-lr` and its dense twin, one thread.

Each batch is timed in three processes; a layer's time is the median of theirs.

python -m benchmarks.mac_time [--out benchmarks/results/mac_time.json]
"""

from __future__ import annotations

from statistics import correlation, median
from typing import Any

from benchmarks.common import parser, run_command, write_record
from lowrank_cnn.core.processes import apart
from lowrank_cnn.deploy.timing import Timing, time_model
from lowrank_cnn.models import create_model

NETWORK, BATCHES, PROCESSES = "vgg11-gmp-lr", (1, 32), 3


def timed(batch: int) -> list[dict[str, Any]]:
    """The network and its twin, timed in this process."""
    found = time_model(
        create_model(NETWORK), (3, 224, 224), batch=batch, threads=1, repeats=5 if batch > 1 else 15
    )
    assert found.twin is not None
    return [_row(found), _row(found.twin)]


def _row(timing: Timing) -> dict[str, Any]:
    layers = [{"name": layer.name, "macs": layer.macs, "ms": layer.ms} for layer in timing.layers]
    return {"network": timing.name, "macs": timing.macs, "ms": timing.total.ms, "layers": layers}


def told(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Pearson's r of the layers with MACs, of those without the first, and of all: pools and ReLUs have none."""
    counted = [layer for layer in layers if layer["macs"]]
    kinds = {"layers_with_macs": counted, "without_the_first": counted[1:], "all_layers": layers}
    return {
        name: correlation([float(one["macs"]) for one in some], [one["ms"] for one in some])
        for name, some in kinds.items()
    }


def main() -> None:
    out, rows = parser(__doc__, "mac_time.json").parse_args().out, []
    for batch in BATCHES:
        for runs in zip(*(apart(__file__, "timed", batch) for _ in range(PROCESSES)), strict=True):
            times = zip(*([layer["ms"] for layer in run["layers"]] for run in runs), strict=True)
            layers = [one | {"ms": median(ms)} for one, ms in zip(runs[0]["layers"], times, strict=True)]
            each = [run["ms"] for run in runs]
            row = runs[0] | {"batch": batch, "ms": median(each), "of_processes": each, "layers": layers}
            rows.append(row | {"r": told(layers), "r_of_processes": [told(run["layers"]) for run in runs]})
            print(row["network"], batch, rows[-1]["ms"], rows[-1]["r"], flush=True)
    write_record(out, "mac-time", by_line="rows", rows=rows)


if __name__ == "__main__":
    run_command(main)
