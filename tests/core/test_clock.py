"""Functions are timed in turns, and the number of threads is put back."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lowrank_cnn.core import clock
from lowrank_cnn.core.clock import OutOfTime, Sample, deadline, measure, torch_threads
from lowrank_cnn.core.errors import LowRankError


def test_functions_take_turns_after_a_warm_up():
    order: list[str] = []
    found = measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert "".join(order) == "aabb" + "ababab"
    for sample in found.values():
        assert sample.runs == 3
        assert 0 <= sample.low <= sample.ms <= sample.high


def test_a_spent_budget_leaves_three_runs_and_impossible_numbers_are_refused():
    assert measure({"a": lambda: None}, repeats=15, budget=0.0)["a"].runs == 3
    for repeats, says in ((10**21, "at most 1,000,000, not"), (2, "at least 3 and at most 1,000,000, not 2")):
        with pytest.raises(LowRankError, match=says):
            measure({"a": lambda: None}, repeats=repeats)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before
    for threads in (0, -1, 10**6, 10**21):
        with (
            pytest.raises(LowRankError, match=f"threads must be .* at most 1,024, not {threads:,}"),
            torch_threads(threads),
        ):
            pytest.fail("entered")


def test_a_block_is_stopped_at_its_deadline_and_alarms_are_given_back():
    before = signal.getsignal(signal.SIGALRM)

    def never_ends() -> None:
        with deadline(0.01), contextlib.suppress(Exception):
            time.sleep(600)

    with pytest.raises(OutOfTime):
        never_ends()
    with deadline(600):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_import_is_not_stopped_half_way(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_import.py").write_text("import signal; signal.raise_signal(signal.SIGALRM); whole = True")
    monkeypatch.syspath_prepend(tmp_path)
    with deadline(600):
        assert importlib.import_module("slow_import").whole


def test_other_threads_and_no_deadline_run_to_the_end():
    def ends(seconds: float) -> str:
        with deadline(seconds):
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert [ends(float("inf")), pool.submit(ends, 0.0).result()] == ["done", "done"]


def test_one_run_is_enough_where_the_budget_is_used_up(monkeypatch: pytest.MonkeyPatch):
    ticks, runs = itertools.count(), []
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(ticks), sleep=lambda _: None))
    taken = measure({"slow": lambda: runs.append(1)}, budget=0.5, fewest=1)["slow"]
    assert (taken, len(runs)) == (Sample(1000.0, 1000.0, 1000.0, 1), 1)
