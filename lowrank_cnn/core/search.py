"""The one search: build each candidate, compare it with the original, time those that agree, keep the fastest.

    search = Search(lambda form: objection(form, net, x), budget=30)
    search.made["as given"] = net
    for name, build in candidates.items():
        search.attempt(name, build)
    times = search.times(lambda forms: measure({name: ... for name, form in forms.items()}))

The autotuner chooses kernels by it, `plan` the way of each block, `optimize` the form of a network, `time_engines`
an engine. The clock belongs to the caller: it times all candidates in turns, or each in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from lowrank_cnn.core.clock import OutOfTime, deadline
from lowrank_cnn.core.errors import LostDeviceError, first_line

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")
Time = TypeVar("Time")

RESERVED = 0.2
"""The share of the budget that is kept for timing: no candidate is begun then, and one under way is stopped."""


class Search(Generic[Key, Made]):
    """Candidates that were built and agree (`made`), and the reasons of those that were left out (`failed`).

    `differs` gives the reason why a candidate is not the original, or an empty text. The original itself goes into
    `made` directly. `budget` is in seconds, and begins with the search.
    """

    def __init__(self, differs: Callable[[Made], str] = lambda _: "", *, budget: float = float("inf")) -> None:
        self.differs, self.budget = differs, budget
        self.made: dict[Key, Made] = {}
        self.failed: dict[Key, str] = {}
        self.began = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.began + self.budget - time.perf_counter()

    def attempt(self, key: Key, build: Callable[[], Made | None], *, reserved: float | None = RESERVED) -> bool:
        """Build a candidate and compare it; one that fails, differs or comes too late is left out.

        `build` gives None for a candidate that does not apply. It is not begun when only the share `reserved` of
        the budget is left; if that is None, it has as long as it takes.
        """
        hurried = reserved is not None and self.budget < float("inf")
        if reserved is not None and self.left <= reserved * self.budget < float("inf"):
            self.failed[key] = f"not tried: the budget of {self.budget:g} s was used up"
            return False
        made = None
        try:
            with deadline(self.left - RESERVED * self.budget if hurried else float("inf")):
                made = build()
                reason = "" if made is None else self.differs(made)
        except LostDeviceError:
            raise
        except OutOfTime:
            reason = f"stopped: the budget of {self.budget:g} s was used up"
        except Exception as error:  # no compiler, no memory, or whatever a foreign forward does
            reason = first_line(error)
        if reason:
            self.failed[key] = reason
        elif made is not None:
            self.made[key] = made
        return key in self.made

    def times(self, clock: Callable[[Mapping[Key, Made]], dict[Key, Time]]) -> dict[Key, Time]:
        """The table of times of everything that was made. A clock may leave out candidates that fail now."""
        taken = clock(self.made) if self.made else {}
        self.made = {key: made for key, made in self.made.items() if key in taken}
        return taken
