"""The short form of `make fuzz`: readers take hostile input; and the harness notices one that does not."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the harness forks")

INPUTS = 540


@pytest.mark.slow
def test_every_reader_takes_hostile_input():
    from fuzz_harness import FAULTS, run_cases
    from fuzz_targets import TARGETS

    assert len(TARGETS) * 25 < INPUTS
    counts, explained = run_cases(INPUTS)
    assert counts["inputs"] == INPUTS
    assert not any(counts[fault] for fault in FAULTS), "\n".join(explained)


def raw(place, draw):
    raise KeyError


def hung(place, draw):
    time.sleep(60)


def over_memory(place, draw):
    torch.ones(2**30)


def killed(place, draw):
    os._exit(9)


def code_run(place, draw):
    (place.parent / "canary").touch()


def outside(place, draw):
    (place.parent / "other").touch()


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (raw, "raw"),
        (hung, "hung"),
        (over_memory, "over memory"),
        (killed, "over memory"),
        (code_run, "code run"),
        (outside, "outside"),
    ],
)
def test_the_harness_notices(target, fault, monkeypatch):
    import fuzz_harness

    monkeypatch.setattr(fuzz_harness, "TARGETS", {"one": target})
    monkeypatch.setattr(fuzz_harness, "SECONDS", 0.5 if fault == "hung" else 3)
    counts, explained = fuzz_harness.run_cases(1)
    assert (counts["inputs"], counts[fault]) == (1, 1), explained
