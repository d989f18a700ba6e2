"""The faster memory layout for training and inference on a CPU, dense and low-rank.

python -m benchmarks.cpu_layout [--out benchmarks/results/cpu_layout.json]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.common import milliseconds, parser, write_record
from lowrank_cnn.models import create_model

Step = Callable[[nn.Module, Tensor], None]

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
REPEATS = 7


def train(net: nn.Module, x: Tensor) -> None:
    net.train()(x).logsumexp(1).sum().backward()


@torch.no_grad()
def infer(net: nn.Module, x: Tensor) -> None:
    net.eval()(x)


def in_turns(step: Step, networks: dict[str, tuple[nn.Module, Tensor]]) -> dict[str, list[float]]:
    """Milliseconds of each network's step, one after the other in every round."""
    times: dict[str, list[float]] = {layout: [] for layout in networks}
    for turn in range(REPEATS + 1):
        for layout, (net, x) in networks.items():
            began = time.perf_counter()
            step(net, x)
            if turn:  # the first warms up
                times[layout].append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    out = parser(__doc__, "cpu_layout.json").parse_args().out
    rows = []
    for name in ("nin", "nin-c3-lr"):
        networks = {}
        for layout, memory_format in LAYOUTS.items():
            net = create_model(name, width=0.25, norm="batch").to(memory_format=memory_format)  # type: ignore[call-overload]
            networks[layout] = net, torch.randn(64, 3, 30, 30).to(memory_format=memory_format)
        for step in (train, infer):
            for layout, times in in_turns(step, networks).items():
                row = {"network": name, "layout": layout, "step": step.__name__, "n": REPEATS}
                rows.append(row | milliseconds(times))
                print(rows[-1], flush=True)
    write_record(out, "cpu-layout", rows=rows)


if __name__ == "__main__":
    main()
