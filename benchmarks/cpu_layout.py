"""Which memory layout a CPU trains and infers faster in, dense and low-rank.

python benchmarks/cpu_layout.py [--out benchmarks/results/cpu_layout.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowrank_cnn.environment import environment
from lowrank_cnn.models import create_model

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
REPEATS = 7


def train(net: nn.Module, x: Tensor) -> None:
    net.train()(x).logsumexp(1).sum().backward()


@torch.no_grad()
def infer(net: nn.Module, x: Tensor) -> None:
    net.eval()(x)


def milliseconds(step, net: nn.Module, x: Tensor) -> list[float]:
    step(net, x)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step(net, x)
        times.append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_layout.json"))
    out: Path = parser.parse_args().out
    rows = []
    for name in ("nin", "nin-c3-lr"):
        for layout, memory_format in LAYOUTS.items():
            net = create_model(name, width=0.25, norm="batch").to(memory_format=memory_format)  # type: ignore[call-overload]
            x = torch.randn(64, 3, 30, 30).to(memory_format=memory_format)
            for step in (train, infer):
                times = milliseconds(step, net, x)
                row = {"network": name, "layout": layout, "step": step.__name__, "ms": median(times)}
                rows.append(row | {"least": min(times), "most": max(times), "n": REPEATS})
                print(rows[-1], flush=True)
    record = {"kind": "cpu-layout", "rows": rows, "environment": environment()}
    out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
