"""Files are written whole or not at all, regular files of bounded size are read, one process uses a directory."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import (
    LOCK,
    BrokenSealError,
    HeldError,
    UnreadableError,
    as_path,
    below,
    clear_temporaries,
    delete,
    is_regular,
    locked,
    open_in_place,
    read_json,
    read_regular,
    replacing,
    sealed,
    set_aside,
    unsealed,
    write_atomically,
    write_json,
)

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")


@pytest.mark.parametrize("call", ["fsync", "replace", "writer"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call):
    path = tmp_path / "file.onnx"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with replacing(path) as temporary:
            assert temporary.suffix == ".onnx"
            temporary.write_bytes(b"half")
            if call == "writer":
                raise KeyError

    with monkeypatch.context() as patch:
        if call != "writer":
            patch.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(KeyError if call == "writer" else LowRankError, match=r"disk is full|^$"):
            write()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.onnx"]


def test_names_and_places_of_files(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LowRankError, match=r"could not be written \(.*\)\.$"):
        write_atomically(tmp_path / "file" / "below", b"")
    longest = tmp_path / ("n" * 255)
    write_json(longest, {"a": 1})
    assert read_json(longest) == {"a": 1}
    (tmp_path / "folder" / "below").mkdir(parents=True)
    assert not delete(tmp_path / "folder")
    assert delete(tmp_path / "absent")


def test_leftovers_are_removed_and_obstacles_renamed(tmp_path):
    (tmp_path / ".tmp-99-0.json").write_text("half")
    (tmp_path / ".tmp-99-1.json").mkdir()
    (tmp_path / "mine.tmp").write_text("kept")
    clear_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]
    for expected in ("record.json.damaged", "record.json.damaged-1"):
        (tmp_path / "record.json").mkdir()
        assert set_aside(tmp_path / "record.json")
        assert (tmp_path / expected).is_dir()
    assert not set_aside(tmp_path / "absent")


def test_a_link_in_a_folder_is_never_written_through(tmp_path):
    (victim := tmp_path / "victim").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("record.json", *(f".tmp-{os.getpid()}-{number}.json" for number in range(999)), "answers.bits"):
        (run / name).symlink_to(victim)
    write_json(run / "record.json", {})
    with pytest.raises(LowRankError, match="is a link"):
        open_in_place(run / "answers.bits")
    assert (read_json(run / "record.json"), victim.read_text()) == ({}, "mine")
    (run / "part").symlink_to(tmp_path)
    assert below(run, run / "other" / "seed0")
    with pytest.raises(LowRankError, match=r"leads from .*seed0 elsewhere"):
        below(run, run / "part" / "seed0")


@needs_pipes
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "behind a link"])
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(tmp_path, kind, linked):
    path = tmp_path / "special.html"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except OSError:
            pytest.skip("device nodes are made by root")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.mkdir()
    before = path.lstat()
    named = tmp_path / ("link.html" if linked else path.name)
    if linked:
        named.symlink_to(path)
    with pytest.raises(LowRankError, match=r"could not be written \(Not a regular file\)"):
        write_atomically(named, b"page")
    assert os.path.samestat(before, path.lstat())
    assert path.lstat().st_mode == before.st_mode
    assert not is_regular(named)
    with pytest.raises(OSError, match=r"Not a regular file|No such device"):
        read_regular(named, most=10)


def test_regular_files_of_bounded_size_are_read_through_links_too(tmp_path):
    (tmp_path / "plain").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    assert is_regular(tmp_path / "link")
    assert read_regular(tmp_path / "link", most=5) == b"12345"
    with pytest.raises(OSError, match="Larger than"):
        read_regular(tmp_path / "link", most=4)
    assert not is_regular("a\0b")
    with pytest.raises(UnreadableError, match="cannot be read"):
        read_json(tmp_path / "absent")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 200_000, b"1" * 5000, json.dumps({"a": 1}).encode("utf-16")[:-1]],
    ids=["empty", "cut", "bytes", "deep", "long number", "half a character"],
)
def test_what_is_not_json_is_one_sentence(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnreadableError, match="not JSON"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("source", ["n" * 300, "~no-such-user/x", "a\0b", 3, None, b"bytes", "\ud800"])
def test_what_cannot_be_a_path_is_one_sentence(source):
    with pytest.raises(LowRankError, match=r"cannot be a path \(.+\)\.$"):
        as_path(source)


def test_names_that_are_not_utf8_are_paths(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert as_path(str(path)) == path
    assert as_path("~") == Path.home()


VALUES = {
    "top1": 0.1 + 0.2,
    "history": [{"loss": None, "epoch": 1}],
    "name": "nin \ud800",
    "by": {2: "a", 10: "b"},
}


def test_sealed_values_come_back_whatever_the_order_and_the_spaces():
    stored = json.loads(json.dumps(sealed(VALUES), indent=3, sort_keys=True))
    back = unsealed(stored)
    assert back == unsealed(back) == json.loads(json.dumps(VALUES))
    assert ("sha256" in stored, "sha256" in back) == (True, False)


@pytest.mark.parametrize("change", [{"top1": 0.4}, {"history": []}, {"new": 1}, {"sha256": "0"}, {"sha256": None}])
def test_changed_values_break_the_seal(change):
    with pytest.raises(BrokenSealError, match="checksum"):
        unsealed(sealed(VALUES) | change)


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


@pytest.fixture
def hold(tmp_path):
    """Hold the directory in another process, and in its forked child if asked; killed with the test."""
    started = []

    def start(how: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def assert_free(folder: Path) -> None:
    """Assert that this process can take the lock: it raises `HeldError` otherwise."""
    with locked(folder):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child is forked")
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, hold, monkeypatch):
    process = hold("fork")
    with pytest.raises(HeldError, match=rf"in use by another process \({process.pid}\)"):
        assert_free(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")  # of the processes of one run, the first holds it for all
        assert_free(tmp_path)
    process.kill()
    process.wait()
    assert_free(tmp_path)  # though a child of the process still runs


def test_the_thread_that_holds_it_may_enter_again_and_another_may_not(tmp_path):
    refused = []

    def enter() -> None:
        try:
            assert_free(tmp_path)
        except HeldError as error:
            refused.append(str(error))

    with locked(tmp_path), locked(tmp_path):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    enter()
    assert len(refused) == 1
    assert "another thread" in refused[0]


def test_a_lock_leaves_nothing_behind_and_what_is_left_is_no_obstacle(tmp_path, monkeypatch):
    with locked(tmp_path / "runs" / "first"):
        assert (tmp_path / "runs" / "first" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "runs"):
        (tmp_path / "runs" / "kept").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["kept"]
    (tmp_path / LOCK).write_text("12345")  # of a killed process
    assert_free(tmp_path)
    with pytest.raises(LowRankError, match="cannot be made"):
        assert_free(tmp_path / "runs" / "kept" / "below")
    monkeypatch.setattr("lowrank_cnn.core.files.fcntl", None)  # a file system without locks
    assert_free(tmp_path)


@needs_pipes
@pytest.mark.parametrize("plant", [os.symlink, os.link, lambda _, lock: os.mkfifo(lock)])
def test_a_link_or_a_pipe_in_place_of_the_lock_is_refused_and_stays(tmp_path, plant):
    (victim := tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    plant(victim, tmp_path / "run" / LOCK)
    with pytest.raises(LowRankError, match=r"held\.lock is a link, has a second name or is no regular file"):
        assert_free(tmp_path / "run")
    assert victim.read_text() == "mine"
    assert (tmp_path / "run" / LOCK).exists()
