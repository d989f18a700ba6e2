"""The short form of `make fuzz`: readers take hostile input; and the harness notices one that does not."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the harness forks")

INPUTS = 240


@pytest.mark.slow
def test_every_reader_takes_hostile_input():
    from fuzz_harness import FAULTS, run_cases
    from fuzz_targets import TARGETS

    assert len(TARGETS) * 10 < INPUTS
    counts, explained = run_cases(INPUTS)
    assert counts["inputs"] == INPUTS
    assert not any(counts[fault] for fault in FAULTS), "\n".join(explained)


@pytest.mark.parametrize(
    ("fault", "target"),
    [
        ("raw", lambda place, draw: {}["key"]),
        ("hung", lambda place, draw: time.sleep(600)),
        ("over memory", lambda place, draw: torch.ones(2**30)),
        ("over memory", lambda place, draw: os._exit(9)),
        ("code run", lambda place, draw: (place.parent / "canary").touch()),
        ("outside", lambda place, draw: (place.parent / "other").touch()),
    ],
)
def test_the_harness_notices(target, fault, monkeypatch):
    import fuzz_harness

    monkeypatch.setattr(fuzz_harness, "TARGETS", {"one": target})
    monkeypatch.setattr(fuzz_harness, "SECONDS", 0.5 if fault == "hung" else 600)
    counts, explained = fuzz_harness.run_cases(1)
    assert (counts["inputs"], counts[fault]) == (1, 1), explained
