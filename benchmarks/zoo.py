"""Convert, count and run every convolutional network of timm and torchvision, and name what fails.

    python -m benchmarks.zoo --scheme lr-join --jobs 14 --budget 540

Each network is built without trained weights, converted, counted before and after, and run on one image
(`zoo_network`). Very large ones are run last, few at a time.

Networks are examined in child processes. If one fails, hangs or ends its process, it is named, and a new process
continues with the next. The record is written every few seconds, and the same command continues with the missing
networks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import resource
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import parser, write_record
from benchmarks.zoo_network import Row, examine

LARGEST = 300_000_000
"""Networks of more parameters are run at the end, a few at a time: each takes their memory three times."""
FEW = 3
HEAVY = 8 * 2**30
"""A process that ever took this many bytes is ended after the current network."""
WRITE_EVERY = 5.0
TO_START = 60.0
"""Seconds that a process may take to load torch; they do not count as the network's."""
LATER = ("not reached", "counted")
"""Outcomes that another run may improve."""


def names(family: str) -> list[str]:
    """Every classification network of a family, as `family:NAME`."""
    if family == "timm":
        return [f"timm:{name}" for name in import_module("timm").list_models()]
    models = import_module("torchvision.models")
    return [f"torchvision:{name}" for name in models.list_models(module=models)]


def serve(pipe: Connection, scheme: str, largest: int) -> None:
    """A process that examines the networks it is sent, until it is ended or too large."""
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    # Ignore what networks print while they are built.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < HEAVY:
            pipe.send(examine(pipe.recv(), scheme, largest))


@dataclass
class Examiner:
    """One process at a time, restarted if it has ended."""

    scheme: str
    largest: int
    process: Any = None
    pipe: Any = None

    def ask(self, text: str, seconds: float, *, again: bool = True) -> Row:
        """The row of a network; a process that is too slow is ended."""
        start = time.monotonic()
        try:
            if self.process is None or not self.process.is_alive():
                self._begin()
            self.pipe.send(text)
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            why = f"took more than {seconds:.0f} s"
        except (EOFError, OSError):
            code = self._exit_code()
            if code == 0 and again:  # it had grown too large, and ended before this network
                self.end()
                return self.ask(text, seconds, again=False)
            why = f"its process ended with {code}"
        self.end()
        return {"network": text, "outcome": "failed", "why": why, "seconds": round(time.monotonic() - start, 1)}

    def _begin(self) -> None:
        self.end()
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, self.scheme, self.largest), daemon=True)
        self.process.start()
        theirs.close()  # else its end would not be noticed here
        if not self.pipe.poll(TO_START):
            raise TimeoutError
        self.pipe.recv()

    def _exit_code(self) -> int | None:
        self.process.join(5)
        return self.process.exitcode

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(5)
            self.pipe.close()
            self.process = None


@dataclass
class Table:
    """The rows so far, by name, and the file that they go to."""

    path: Path
    about: Row
    rows: dict[str, Row] = field(default_factory=dict)
    written: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Row) -> None:
        with self.lock:
            self.rows[row["network"]] = row
            if time.monotonic() > self.written + WRITE_EVERY:
                self.write()

    def write(self) -> None:
        """Write a line per network, atomically."""
        rows = [self.rows[name] for name in sorted(self.rows)]
        write_record(self.path, "zoo", by_line="networks", **self.about, networks=rows)
        self.written = time.monotonic()


def examine_all(texts: list[str], table: Table, options: argparse.Namespace, largest: int, jobs: int) -> None:
    """Spread the networks over processes, until all are done or time is up."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for text in texts:
        waiting.put(text)

    def work() -> None:
        examiner = Examiner(options.scheme, largest)
        try:
            while (left := options.deadline - time.monotonic()) > 0:
                row = examiner.ask(waiting.get_nowait(), min(options.patience, left))
                if row["outcome"] != "failed" or time.monotonic() < options.deadline:
                    table.add(row)
        except queue.Empty:
            pass
        finally:
            examiner.end()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(texts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def show(rows: list[Row]) -> None:
    for row in rows:
        if row["outcome"] in ("converted", "counted"):
            ratio = row["macs_after"] / max(1, row["macs_before"])
            print(f"{row['network']:60} {row['macs_before'] / 1e9:8.2f}G {ratio:6.3f} {row['changed']:4} layers")
    for row in rows:
        if row["outcome"] == "failed":
            print(f"FAILED {row['network']}: {row['why']}")
    print(dict(Counter(row["outcome"] for row in rows)))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "zoo.json")
    made.add_argument("--families", nargs="+", default=["torchvision", "timm"], choices=["torchvision", "timm"])
    made.add_argument("--scheme", default="lr-join")
    made.add_argument("--match", default="", help="only networks whose name contains this")
    made.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes")
    made.add_argument("--largest", type=int, default=LARGEST, help="parameters that many jobs run side by side")
    made.add_argument("--patience", type=float, default=90, help="seconds for one network")
    made.add_argument("--budget", type=float, default=540, help="seconds in all")
    return made.parse_args()


def _table(options: argparse.Namespace) -> Table:
    """The table of this scheme with what an earlier run has left, or a new one."""
    from lowrank_cnn.core.environment import environment

    versions = {family: getattr(import_module(family), "__version__", None) for family in options.families}
    about = {"scheme": options.scheme, "environment": environment() | versions}
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept = before.get("networks", []) if before.get("scheme") == options.scheme else []
    return Table(options.out, about, {row["network"]: row for row in kept if row["outcome"] not in LATER})


def main() -> None:
    options = _arguments()
    options.deadline = time.monotonic() + options.budget
    os.environ["OMP_NUM_THREADS"] = "1"
    table = _table(options)
    texts = [name for family in options.families for name in names(family) if options.match in name]
    texts = [text for text in texts if text not in table.rows]
    for text in texts:
        table.rows[text] = {"network": text, "outcome": "not reached"}
    examine_all(texts, table, options, options.largest, options.jobs)
    large = [name for name, row in table.rows.items() if row["outcome"] == "counted"]
    examine_all(large, table, options, sys.maxsize, min(FEW, options.jobs))
    table.write()
    show([table.rows[name] for name in sorted(table.rows)])


if __name__ == "__main__":
    main()
