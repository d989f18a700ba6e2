"""Jobs in several processes: their order, their errors, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowrank_cnn.choose.runs import WorkerPool
from lowrank_cnn.core.errors import LowRankError

KERNELS = "dense" if torch.cuda.is_available() else "off"
"""How processes that share a device run composite layers."""


def work(job: tuple[str, float]) -> tuple[str, int, str, int]:
    """A job of this test: wait, then fail, die, or tell where it was done."""
    name, seconds = job
    time.sleep(seconds)
    if name == "fail":
        raise LowRankError("this job cannot be done.")
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return name, os.getpid(), os.environ.get("LOWRANK_KERNELS", ""), torch.get_num_threads()


def test_one_process_is_this_one():
    with WorkerPool(work) as pool:
        found = dict(pool.results([("a", 0), ("fail", 0), ("b", 0)]))
    assert found["a", 0] == work(("a", 0))
    assert isinstance(found["fail", 0], LowRankError)
    assert list(found) == [("a", 0), ("fail", 0), ("b", 0)]


def test_several_processes_give_results_in_the_order_of_the_jobs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOWRANK_KERNELS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    jobs = [("slow", 1.0), ("fail", 0.0), ("b", 0.0), ("c", 0.0)]
    with WorkerPool(work, 2) as pool:
        found = list(pool.results(jobs))
        assert [job for job, _ in found] == jobs
        assert str(found[1][1]) == "this job cannot be done."
        done = [result for _, result in found if isinstance(result, tuple)]
        assert os.getpid() not in {process for _, process, *_ in done}
        assert {(kernels, threads) for *_, kernels, threads in done} == {(KERNELS, 3)}
        # A job that waits for another, and a limit that is reached.
        seen: list[tuple[str, float]] = []
        order = pool.results(
            [("last", 0), ("a", 0), ("refused", 0), ("b", 0)],
            ready=lambda job: job[0] != "last" or ("a", 0) in seen,
            may_begin=lambda job: job[0] != "refused",
        )
        seen.extend(job for job, _ in order)
        assert seen[0] == ("a", 0)
        assert ("refused", 0) not in seen
        assert ("b", 0) not in seen


def test_a_process_that_is_killed_is_reported_in_one_sentence():
    with pytest.raises(LowRankError, match="was killed, or could not start: what has finished is saved"):  # noqa: SIM117
        with WorkerPool(work, 2) as pool:
            list(pool.results([("die", 0), ("a", 0)]))


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(how: signal.Signals):
    code = (
        "from tests.choose.test_side_by_side import work; from lowrank_cnn.choose.runs import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    with WorkerPool(work, 2) as pool:\n"
        "        order = pool.results([('a', 0), ('b', 0), ('long', 600), ('longer', 600)])\n"
        "        print(next(order)[1][1], next(order)[1][1], flush=True)\n"
        "        next(order)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    others = [int(number) for number in process.stdout.readline().split()]
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as Ctrl-C does
    else:
        process.send_signal(how)
    _, errors = process.communicate()
    assert errors.count("KeyboardInterrupt") == (how == signal.SIGINT)
    ends = time.monotonic() + 300
    while any(_runs(number) for number in others) and time.monotonic() < ends:
        time.sleep(0.05)
    assert others
    assert not any(_runs(number) for number in others)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_number_of_processes_that_is_none_is_refused():
    with pytest.raises(LowRankError, match="processes must be a whole number of at least 1, not 0"):
        WorkerPool(work, 0)
