"""Inject faults into training runs, resume each, and count what came of them.

    python tests/faults/fault_harness.py --faults 520

- identical: the resumed run ended with the bits of an undisturbed one.
- wedged: it could not be resumed, though a whole checkpoint was there.
- hung: a process did not end within a minute.
- lost: it ended, and files or epochs that it should have are missing.
- silently wrong: it ended with other weights or another history, without a word.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fault_run as run
import torch
from fault_kinds import KINDS, WORK

from lowrank_cnn.train.distributed import import_fabric

OUTCOMES = ("identical", "wedged", "hung", "lost", "silently wrong")


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, and the number that all its random choices follow from."""

    kind: str
    number: int

    @property
    def work(self) -> str:
        return WORK.get(self.kind, "train")

    def inject(self, folder: Path, reference: tuple[dict, list]) -> tuple[str, str]:
        """The outcome, and what explains it."""
        ended = KINDS[self.kind][1](folder, random.Random(f"{self.kind}/{self.number}"))
        if ended is None:
            return "hung", run.said(folder)
        if ended == run.CRASHED:
            return "wedged", run.said(folder)
        again = run.wait_all(run.start_all(folder, self.work))
        if again is None:
            return "hung", run.said(folder)
        if again != run.FINISHED:
            return "wedged", run.said(folder)
        if list((folder / "run").glob(".tmp-*")) or not (folder / "run" / "record.json").is_file():
            return "lost", str(sorted(path.name for path in (folder / "run").iterdir()))
        found = run.result(folder)
        if len(found[1]) != len(reference[1]):
            return "lost", f"{len(found[1])} epochs of {len(reference[1])}"
        return ("identical", "") if run.same(found, reference) else ("silently wrong", run.said(folder))


def faults(count: int, seed: int = 0) -> Iterator[Fault]:
    """This many faults: one of every kind first, then each as often as `KINDS` says."""
    more = [kind for kind, (share, _) in KINDS.items() for _ in range(share - 1)]
    random.Random(seed).shuffle(more)
    kinds = [*KINDS, *more]
    for number in range(count):
        yield Fault(kinds[number % len(kinds)], seed * 1_000_000 + number)


def run_faults(count: int, folder: Path, *, seed: int = 0, show: bool = False) -> tuple[Counter[str], list[str]]:
    """Inject this many faults: how many had which outcome, and an explanation of each that was not identical."""
    torch.set_num_threads(1)
    import_fabric()  # once, here, not in every forked process
    works = {fault.work for fault in faults(count, seed)}
    references = {work: _undisturbed(folder / work, work) for work in works}
    outcomes: Counter[str] = Counter(injected=0, **dict.fromkeys(OUTCOMES, 0))
    explained: list[str] = []
    for number, fault in enumerate(faults(count, seed)):
        place = folder / f"fault-{number}"
        outcome, why = fault.inject(place, references[fault.work])
        outcomes.update(["injected", outcome])
        if outcome != "identical":
            explained.append(f"{outcome}: {fault}\n{why}")
        shutil.rmtree(place, ignore_errors=True)
        if show and sys.stderr.isatty():
            print(f"\r{number + 1} of {count}", end="", file=sys.stderr, flush=True)
    return outcomes, explained


def _undisturbed(folder: Path, work: str) -> tuple[dict, list]:
    assert run.wait_all(run.start_all(folder, work)) == run.FINISHED, run.said(folder)
    return run.result(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=520)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, explained = run_faults(options.faults, Path(folder), seed=options.seed, show=True)
    print(*explained, sep="\n")
    print(", ".join(f"{name} {outcomes[name]}" for name in ("injected", *OUTCOMES)))
    sys.exit(outcomes["identical"] != outcomes["injected"])


if __name__ == "__main__":
    main()
