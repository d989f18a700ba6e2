"""Files are written whole or not at all, and only regular files of bounded size are read."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import (
    UnreadableError,
    as_path,
    below,
    clear_temporaries,
    delete,
    is_regular,
    open_in_place,
    parse_json,
    read_json,
    read_regular,
    replacing,
    set_aside,
    write_atomically,
    write_json,
)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(LowRankError, match="disk is full"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_writer_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.onnx"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            assert temporary.suffix == ".onnx"
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.onnx"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LowRankError, match=r"could not be written \(.*\)\.$"):
        write_atomically(tmp_path / "file" / "below", b"")


def test_the_longest_file_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ".tmp-99-0.json").write_text("half")
    (tmp_path / "mine.tmp").write_text("kept")
    clear_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]


def test_what_is_in_the_way_is_renamed(tmp_path):
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
    with pytest.raises(LowRankError, match=r"leads from .*seed0 to another folder"):
        below(run, run / "part" / "seed0")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "behind a link"])
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, kind, linked):
    path = tmp_path / "special.html"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except OSError:
            pytest.skip("device nodes are made by root")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.mkdir()
    before = path.lstat()
    if linked:
        (tmp_path / "link.html").symlink_to(path)
    with pytest.raises(LowRankError, match=r"could not be written \(Not a regular file\)"):
        write_atomically(tmp_path / ("link.html" if linked else path.name), b"page")
    assert os.path.samestat(before, path.lstat())
    assert path.lstat().st_mode == before.st_mode


def test_a_file_that_cannot_be_deleted_is_left(tmp_path):
    (tmp_path / "folder" / "below").mkdir(parents=True)
    assert not delete(tmp_path / "folder")
    assert delete(tmp_path / "absent")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_what_has_no_end_or_no_writer_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("fifo.jpg", "zero.jpg", "folder.jpg"):
        assert not is_regular(tmp_path / name)
        with pytest.raises(OSError, match="Not a regular file"):
            read_regular(tmp_path / name, most=10)
    (tmp_path / "link.jpg").symlink_to(tmp_path / "plain.jpg")
    (tmp_path / "plain.jpg").write_bytes(b"123")
    assert read_regular(tmp_path / "link.jpg", most=10) == b"123"
    assert is_regular(tmp_path / "link.jpg")
    assert not is_regular("a\0b")


def test_a_file_larger_than_allowed_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="Larger than"):
        read_regular(tmp_path / "file", most=4)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 200_000, b"1" * 5000, json.dumps({"a": 1}).encode("utf-16")[:-1]],
    ids=["empty", "cut", "bytes", "deep", "long number", "half a character"],
)
def test_what_is_not_json_is_one_sentence(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnreadableError, match="not JSON"):
        read_json(tmp_path / "file")
    with pytest.raises(UnreadableError):
        parse_json(content)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UnreadableError, match="cannot be read"):
        read_json(tmp_path / "absent")


@pytest.mark.parametrize("source", ["n" * 300, "~no-such-user/x", "a\0b", 3, None, b"bytes", "\ud800"])
def test_what_cannot_be_a_path_is_one_sentence(source):
    with pytest.raises(LowRankError, match="cannot be a path"):
        as_path(source)


def test_names_that_are_not_utf8_are_paths(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert as_path(str(path)) == path
    assert as_path("~") == Path.home()
