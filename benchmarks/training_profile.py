"""The kernels of a training step on a GPU: which of them take the time.

    python -m benchmarks.training_profile torchvision:resnet18/lr torchvision:resnet18/dense [--out RECORD]

Each network trains by `lr.fit` on random images, as in `benchmarks.gpu_models`. The profiler watches the third and
the fourth epoch, after tuning and recording; times are sums over a step, so kernels that overlap count twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lowrank_cnn as lr
from benchmarks.common import earlier_runs, parser, write_runs
from benchmarks.gpu_models import CLASSES, SIZE, created
from lowrank_cnn.core.environment import environment
from lowrank_cnn.data import Data, ResidentSplit

KIND = "training-profile"
NAME_LENGTH = 80
"""Names of library kernels are longer, and differ in template arguments alone."""


def main() -> None:
    made = parser(__doc__, "training_profile.json")
    made.add_argument("networks", nargs="+", help="NETWORK/SCHEME, where a scheme may be dense")
    made.add_argument("--batch", type=int, default=256)
    options = made.parse_args()
    runs = earlier_runs(options.out, KIND)
    rows = []
    runs.append({"environment": environment(), "rows": rows})
    for name in options.networks:
        source, _, scheme = name.rpartition("/")
        net = created(source)
        row = {"network": name, "batch": options.batch}
        rows.append(row | profiled(net if scheme == "dense" else lr.convert(net, scheme), options.batch))
        write_runs(options.out, KIND, runs)
        print(f"{name}: {rows[-1]['ms']:.2f} ms of kernels a step")


def profiled(
    net: nn.Module, batch: int, *, size: tuple[int, int, int] = SIZE, steps: int = 16, classes: int = CLASSES
) -> dict[str, Any]:
    """Milliseconds of a step, and of each kernel with its calls, the longest first."""
    cuda = torch.cuda.is_available()
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (steps * batch, *size), generator=draw, dtype=torch.uint8)
    split = ResidentSplit.of(images, torch.randint(0, classes, (steps * batch,), generator=draw))
    data = Data("random", tuple(map(str, range(classes))), split, split.subset(torch.arange(min(64, batch))))
    watch = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True)
    epochs = 0

    def after_epoch(*_: object, **__: object) -> None:
        nonlocal epochs
        epochs += 1
        if cuda:
            torch.cuda.synchronize()
        if epochs == 2:
            watch.start()
        if epochs == 4:
            watch.stop()

    recipe = lr.get_recipe("modern", batch_size=batch, crop=size[1], pad=0, cutout=0, ema=0.0)
    lr.fit(net, data, recipe, epochs=4, progress=False, compile=False, callbacks=[after_epoch])
    found: dict[str, list[float]] = {}
    for event in watch.key_averages():
        total = found.setdefault(event.key[:NAME_LENGTH], [0.0, 0.0])
        total[0] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3 / steps / 2
        total[1] += event.count / steps / 2
    longest = sorted(found.items(), key=lambda item: -item[1][0])
    kernels = [{"name": name, "ms": round(ms, 4), "calls": round(calls, 1)} for name, (ms, calls) in longest]
    return {"ms": sum(ms for ms, _ in found.values()), "kernels": kernels[:40]}


if __name__ == "__main__":
    main()
