"""What `plan` found out: the times of every way to run each block, what was chosen, and what that gained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from lowrank_cnn.system.clock import Sample
from lowrank_cnn.system.text import si, text_table

GIVEN = "as given"


@dataclass(frozen=True)
class Decision:
    """A block: its epilogue, its multiply-accumulates for this input, the milliseconds of each way, the choice.

    `failed` says why other ways were left out.
    """

    name: str
    epilogue: str
    macs: int
    times: Mapping[str, float]
    choice: str
    failed: Mapping[str, str] = field(default_factory=dict)

    def refused(self, reason: str) -> Decision:
        """The same decision taken back, since with it the whole network fails or differs."""
        return replace(self, choice=GIVEN, failed={**self.failed, self.choice: reason})


@dataclass(frozen=True)
class NetworkPlan:
    """All decisions, and the whole network before and after.

    `used` is False where the network was better as given, and `reason` says why nothing could be planned.
    `neighbours` is whether pools and response norms run by kernels too, on a GPU.
    """

    input: tuple[int, ...]
    device: str
    decisions: tuple[Decision, ...]
    before: Sample
    after: Sample
    used: bool
    reason: str = ""
    neighbours: bool = False

    @property
    def ways(self) -> dict[str, str]:
        """The blocks that run in another way than given, by name; none where the plan is not used."""
        return {row.name: row.choice for row in self.decisions if row.choice != GIVEN} if self.used else {}

    def __str__(self) -> str:
        """The decision table: for each block its MACs, the milliseconds of each way, and the one chosen."""
        if self.reason:
            return f"not planned: {self.reason}"
        ways = list(dict.fromkeys(way for row in self.decisions for way in row.times))
        rows = [
            (row.name, si(row.macs), *(_shown(row.times.get(way)) for way in ways), row.choice)
            for row in self.decisions
        ]
        table = text_table(("block", ">MACs", *(f">{way}" for way in ways), "chosen"), rows)
        verdict = "the plan is used" if self.used else "nothing gained: as given"
        whole = f"whole network: {self.before.ms:.3f} ms before, {self.after.ms:.3f} after; {verdict}"
        notes = [f"{row.name}, {way}: {why}" for row in self.decisions for way, why in row.failed.items()]
        return "\n".join([table, *notes, whole])

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


def _shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}"
