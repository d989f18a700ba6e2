"""What `trace_frontier` is asked for, as one frozen row of plain values."""

from __future__ import annotations

from dataclasses import dataclass

from lowrank_cnn.frontier.designs import find_design
from lowrank_cnn.system.clock import check_budget
from lowrank_cnn.system.errors import LowRankError

MATCHES = ("macs", "time")


@dataclass(frozen=True)
class FrontierPlan:
    """What is asked for.

    - `designs`: low-rank candidates by name or scheme; `widths`: those of the dense network, 1 always among them.
    - `widen`: also each candidate at the width where it costs the dense network's MACs, or time.
    - `match`: also dense networks that cost each candidate's MACs, and time.
    - `rates`: factors of the learning rate to try every design with, `tries` seeds each, on held-out images.
    - `batch`: images in a batch to time inference with; 0 times nothing. `repeats`: runs that a median is of.
    - `base`: the width of the family's own network that counts as 1: below 1 for a miniature.
    - `teacher`: a design, `dense@1.5` say, that is trained first and that all others then learn from as well.
    - `processes`: trainings at a time on the device. Networks are timed alone, before; how long a training takes
      is recorded only with one process.
    - `budget`: seconds after which nothing new is begun.
    """

    designs: tuple[str, ...] = ()
    widths: tuple[float, ...] = ()
    widen: tuple[str, ...] = ()
    match: tuple[str, ...] = MATCHES
    seeds: int = 8
    rates: tuple[float, ...] = ()
    tries: int = 1
    batch: int = 256
    compile: bool = True
    repeats: int = 21
    base: float = 1.0
    teacher: str = ""
    processes: int = 1
    budget: float = float("inf")

    def __post_init__(self) -> None:
        for name in (*self.widen, *self.match):
            if name not in MATCHES:
                raise LowRankError(f"networks are matched by {' or '.join(MATCHES)}, not {name!r}.")
        if self.seeds < 0 or self.batch < 0 or min(self.tries, self.processes) < 1:
            raise LowRankError("seeds and batch are 0 or more, and tries and processes at least 1.")
        check_budget(self.budget)
        if self.teacher:
            find_design(self.teacher)
        if any(not 0 < rate < 1000 for rate in self.rates):
            raise LowRankError("a factor of the learning rate lies above 0 and below 1000.")
        if not self.batch and "time" in (*self.widen, *self.match):
            object.__setattr__(self, "widen", tuple(set(self.widen) - {"time"}))
            object.__setattr__(self, "match", tuple(set(self.match) - {"time"}))
