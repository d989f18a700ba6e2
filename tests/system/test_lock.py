"""One process at a time uses a directory, and the lock goes with the process that holds it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import LOCK, HeldError, locked

HOLD = """
import os, sys, time, pathlib
from lowrank_cnn.core.files import locked
with locked(pathlib.Path(sys.argv[1])):
    if sys.argv[2] == "fork" and not os.fork():
        os.close(1)
        time.sleep(600)
    print("held", flush=True)
    time.sleep(600)
"""


def hold(directory: Path, how: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def assert_free(folder: Path) -> None:
    """Assert that this process can take the lock: it raises `HeldError` otherwise."""
    with locked(folder):
        pass


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path):
    process = hold(tmp_path)
    try:
        with pytest.raises(HeldError, match=rf"in use by another process \({process.pid}\)"), locked(tmp_path):
            pytest.fail("held twice")
    finally:
        process.kill()
        process.wait()
    assert_free(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child is forked")
def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    process = hold(tmp_path, "fork")
    try:
        process.kill()
        process.wait()
        assert_free(tmp_path)
    finally:
        os.killpg(process.pid, 9)


def test_the_thread_that_holds_it_may_enter_again_and_another_may_not(tmp_path):
    refused = []

    def enter() -> None:
        try:
            with locked(tmp_path):
                pass
        except HeldError as error:
            refused.append(str(error))

    with locked(tmp_path), locked(tmp_path):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "another thread" in refused[0]
    enter()
    assert len(refused) == 1


def test_nothing_is_left_behind(tmp_path):
    with locked(tmp_path / "runs" / "first"):
        assert (tmp_path / "runs" / "first" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "runs"):
        (tmp_path / "runs" / "kept").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["kept"]


def test_a_lock_file_of_a_killed_process_is_no_obstacle(tmp_path):
    (tmp_path / LOCK).write_text("12345")
    assert_free(tmp_path)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.core.files.fcntl", None)
    assert_free(tmp_path)


def test_the_processes_of_one_run_hold_it_once(tmp_path, monkeypatch):
    process = hold(tmp_path)
    try:
        monkeypatch.setenv("RANK", "1")
        assert_free(tmp_path)
    finally:
        process.kill()
        process.wait()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LowRankError, match="cannot be made"), locked(tmp_path / "file" / "below"):
        pytest.fail("held")


@pytest.mark.parametrize("plant", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_link_in_place_of_the_lock_is_refused_and_its_file_stays(tmp_path, plant):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    plant(victim, tmp_path / "run" / LOCK)
    with pytest.raises(LowRankError, match=r"held\.lock is a link"), locked(tmp_path / "run"):
        pytest.fail("held")
    assert victim.read_text() == "mine"
    assert (tmp_path / "run" / LOCK).exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_pipe_in_place_of_the_lock_is_refused(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(LowRankError, match="no regular file"), locked(tmp_path):
        pytest.fail("held")
