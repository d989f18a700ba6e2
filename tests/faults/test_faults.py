"""The short form of `make faults`: runs survive every kind of fault, and the harness notices those that do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the harness forks")


@pytest.mark.slow
@pytest.mark.parametrize("without", ["kill an export", pytest.param(None, marks=pytest.mark.nightly)])
def test_runs_survive_every_kind_of_fault(tmp_path, monkeypatch, without):
    from fault_harness import faults, run_faults
    from fault_kinds import KINDS

    if without:  # its processes import for seconds
        monkeypatch.delitem(KINDS, without)
    assert [fault.kind for fault in faults(len(KINDS))] == list(KINDS)
    outcomes, explained = run_faults(len(KINDS), tmp_path)
    assert outcomes["identical"] == outcomes["injected"] == len(KINDS), "\n".join(explained)


def test_traps_reach_nearly_every_file_operation(tmp_path):
    import fault_run as run
    from fault_kinds import OPERATIONS, Trap

    trap, train = Trap(10**9, pytest.fail), run.train

    def counted(folder: Path, seed: int = 0) -> None:
        train(folder, seed)
        (folder / "count").write_text(str(trap.count))

    run.train = counted
    try:
        assert run.wait(run.start(tmp_path, trap.set)) == run.FINISHED, run.said(tmp_path)
    finally:
        run.train = train
    assert OPERATIONS <= int((tmp_path / "count").read_text()) <= OPERATIONS * 1.2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    import fault_run as run

    folder = tmp_path_factory.mktemp("reference")
    assert run.wait(run.start(folder)) == run.FINISHED
    return folder


@pytest.mark.parametrize(
    ("sabotage", "outcome"),
    [
        (lambda run: (run / "record.json").unlink(), "lost"),
        (lambda run: (run / ".tmp-1-0.json").touch(), "lost"),
        (lambda run: [path.unlink() for path in run.glob("step-*.json")], "silently wrong"),
    ],
)
def test_the_harness_notices(tmp_path, monkeypatch, finished, sabotage, outcome):
    """A run whose files are spoilt after it was resumed, as by a fault of this library."""
    import fault_harness
    import fault_run as run

    reference = run.result(finished)
    shutil.copytree(finished, tmp_path / "fault")
    monkeypatch.setitem(fault_harness.KINDS, "none", (1, lambda *_: run.FINISHED))

    def spoil(child: int) -> int:
        sabotage(tmp_path / "fault" / "run")
        if outcome == "silently wrong":
            shutil.rmtree(tmp_path / "fault" / "run")
            assert run_with_seed(run, tmp_path / "fault", 1) == run.FINISHED
        return run.FINISHED

    monkeypatch.setattr(fault_harness.run, "start", lambda *_, **__: 0)
    monkeypatch.setattr(fault_harness.run, "wait", spoil)
    assert fault_harness.Fault("none", 0).inject(tmp_path / "fault", reference)[0] == outcome


def run_with_seed(run, folder: Path, seed: int) -> int:
    """Train in this process: `start` and `wait` are replaced."""
    run.train(folder, seed)
    return run.FINISHED
