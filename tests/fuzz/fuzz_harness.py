"""Give every reader hostile input, within limits of memory and time, and count the outcomes.

    python tests/fuzz/fuzz_harness.py --inputs 10000

A reader may return a value or raise `LowRankError`. Everything else is counted and named:

- raw: another Python error reached the caller.
- hung: a case took more than 20 seconds.
- over memory: a case wanted more than 2 GiB.
- code run: a planted pickle or script was executed.
- outside: a file appeared outside the folder of the case.
- wrong: damaged input was accepted and gave another result, or a file or a device of the user's was changed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: names are not looked up by a test
import fuzz_inputs
import torch
from fuzz_targets import TARGETS, Accepted

from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError

SECONDS = 20
MEMORY = 2 * 2**30
FAULTS = ("raw", "hung", "over memory", "code run", "outside", "wrong")
HUNG = "hung\n"
CANARY = "canary"
"""A planted pickle writes a file of this name into the folder above that of its case."""


@dataclass(frozen=True)
class Case:
    """One input: the reader it is for, and the number that all its random choices follow from."""

    target: str
    number: int

    def run(self, folder: Path) -> str:
        """The outcome, and behind it what explains a fault."""
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.chdir(place)
        before = _listing(folder)
        try:
            TARGETS[self.target](place, random.Random(f"{self.target}/{self.number}"))
        except LowRankError as error:
            outcome = "refused" if "\n" not in str(error) else f"raw\n{error!r} has several lines"
        except Accepted:
            outcome = f"wrong\n{traceback.format_exc()}"
        except Exception as error:
            outcome = f"{'over memory' if is_out_of_memory(error) else 'raw'}\n{traceback.format_exc()}"
        else:
            outcome = "read"
        after = _listing(folder)
        if CANARY in after:
            (folder / CANARY).unlink()
            return f"code run\n{outcome}"
        return outcome if after == before else f"outside\n{after - before}"


def _listing(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def run_cases(count: int, *, seed: int = 0, show: bool = False) -> tuple[Counter[str], list[str]]:
    """So many inputs, over all readers: how many had which outcome, and an explanation of each fault."""
    fuzz_inputs.exported(), fuzz_inputs.bombs(), fuzz_inputs.trained()  # once, and not within the limits of a case
    names = list(TARGETS)
    cases = [Case(names[i % len(names)], seed * 10_000_000 + i) for i in range(count)]
    counts: Counter[str] = Counter(inputs=0, refused=0, read=0, **dict.fromkeys(FAULTS, 0))
    explained: list[str] = []
    while counts["inputs"] < count:
        with tempfile.TemporaryDirectory() as folder:
            for case, outcome in _in_child(cases[counts["inputs"] :], Path(folder)):
                if outcome == HUNG:  # on a busy machine it may only have waited: a real hang hangs again
                    [(_, outcome)] = _in_child([case], Path(folder))
                name, _, why = outcome.partition("\n")
                counts.update(["inputs", name])
                if name in FAULTS:
                    explained.append(f"{name}: {case}\n{why}")
                if show and counts["inputs"] % 500 == 0:
                    print(dict(counts), file=sys.stderr, flush=True)
    return counts, explained


def _in_child(cases: list[Case], folder: Path):
    """Run cases one after another in a forked process; the first that ends it is the last that this yields."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _serve(cases, folder, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        for case in cases:
            ready, _, _ = select.select([pipe], [], [], SECONDS)
            if not ready:
                os.kill(child, signal.SIGKILL)
                yield case, HUNG
                break
            try:
                yield case, pickle.load(pipe)
            except EOFError:  # killed by the system, or by a library
                yield case, "over memory\nthe process ended"
                break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _serve(cases: list[Case], folder: Path, writer: int) -> None:
    """In the child: run the cases within the limit of memory, and tell the outcome of each."""
    os.environ["LOWRANK_CACHE"] = str(folder / "case" / "cache")
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        for case in cases:
            pipe.write(pickle.dumps(case.run(folder)))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, explained = run_cases(options.inputs, seed=options.seed, show=True)
    print(*explained, sep="\n")
    print(", ".join(f"{name} {counts[name]}" for name in ("inputs", "refused", "read", *FAULTS)))
    sys.exit(any(counts[name] for name in FAULTS))


if __name__ == "__main__":
    main()
