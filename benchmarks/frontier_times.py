"""Time all networks of a frontier's record again, when kernels are newer than it; no images are needed.

    python -m benchmarks.frontier_times --out benchmarks/results/frontier/cifar10-nin-rivals --side 32 --classes 10

Each network gets a new form through `optimize`, in turns with the dense one. Then all take turns in three fresh
processes. The record keeps its times until all are taken.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import parser, run_command
from lowrank_cnn.choose.candidates import DENSE, Builder, find_family
from lowrank_cnn.choose.frontier import load_frontier
from lowrank_cnn.choose.runs import release_memory
from lowrank_cnn.choose.target import Target, TimedDesigns
from lowrank_cnn.choose.trace import PROCESSES, time_in_turns
from lowrank_cnn.train.distributed import resolve_device


def main() -> None:
    arguments = parser(__doc__, "frontier")
    arguments.add_argument("--side", type=int, required=True, help="pixels of a side of the images")
    arguments.add_argument("--classes", type=int, required=True)
    arguments.add_argument("--batch", type=int, default=256, help="images that are timed together")
    arguments.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments.add_argument("--repeats", type=int, default=21)
    arguments.add_argument("--device", default="auto")
    given = arguments.parse_args()
    found, how = load_frontier(given.out), {"compile": not given.no_compile, "repeats": given.repeats}
    batch, device = given.batch, resolve_device(given.device)
    about = found.about["recipe"]["norm"], found.about["network"]["base"]
    size = 3, given.side, given.side
    builder = Builder.of_family(find_family(found.about["family"]), size, given.classes, *about)
    timed, times = TimedDesigns(found, builder, Target(device), print, batch=batch, scratch=Path(), **how), {}
    for row in sorted(found.rows, key=lambda row: row.design != DENSE):
        times[row.name] = timed.time(row.design)
        print(f"{row.name}: {times[row.name].ms:.3f} ms ({times[row.name].choice})")
    for row in found.rows:
        row.timing = times[row.name]
    timed.reference = None
    release_memory()  # the processes need it
    for _ in range(PROCESSES):
        time_in_turns(found, (found.about["family"], size, given.classes, *about), device, batch, how, print)
    found.save()


if __name__ == "__main__":
    run_command(main)
