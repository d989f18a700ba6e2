"""Kinds of faults: kill, freeze, fill the disk, revoke rights, damage and swap files, jump the clock, and so on.

A fault is injected into a run in a folder of its own. It returns how its processes ended. The harness then resumes
the run without a fault and compares the result with that of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fault_run as run

from lowrank_cnn.data.store import SAMPLED_FILES, evenly_spaced

OPERATIONS = 265
"""File operations of an undisturbed run, or a few less; `test_faults.py` counts them."""
EXPORT_OPERATIONS = 24
"""The same of an undisturbed export."""
DAMAGES = ("flip", "flip", "flip", "cut", "empty", "zero", "garbage", "deep", "directory", "fifo", "delete")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EBUSY)


class Trap:
    """Counts the file operations of this process, and springs at one of them."""

    def __init__(self, at: int, spring: Callable[[], None], *, lasting: bool = False, only: str = "") -> None:
        self.at, self.spring, self.lasting, self.only, self.count = at, spring, lasting, only, 0

    def set(self) -> None:
        """Patch what `lowrank_cnn.core.files` writes with; a write that fails has written half."""
        write, fsync, replace, unlink = Path.write_bytes, os.fsync, os.replace, os.unlink

        def half_written(path: Path, payload: bytes) -> int:
            if self.due("write"):
                write(path, payload[: len(payload) // 2])
                self.spring()
            return write(path, payload)

        def trapped(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if self.due(name):
                self.spring()
            return call(*arguments, **options)

        Path.write_bytes = half_written  # type: ignore[method-assign, assignment]
        os.fsync = partial(trapped, "fsync", fsync)
        os.replace = partial(trapped, "replace", replace)
        os.unlink = partial(trapped, "unlink", unlink)

    def due(self, name: str) -> bool:
        if self.only and name != self.only:
            return False
        self.count += 1
        return self.count >= self.at if self.lasting else self.count == self.at


def kill(folder: Path, draw: random.Random) -> int | None:
    """SIGKILL at an exact file operation, half of a write included."""
    at = draw.randint(1, OPERATIONS)
    return run.wait(run.start(folder, Trap(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).set))


def kill_twice(folder: Path, draw: random.Random) -> int | None:
    """SIGKILL, and again while the resumed run writes."""
    kill(folder, draw)
    return kill(folder, draw)


def interrupt(folder: Path, draw: random.Random) -> int | None:
    """Ctrl-C or SIGTERM at any moment."""
    child = run.start(folder)
    _wait_for(folder, draw.randint(0, 8))
    _signal(child, draw.choice((signal.SIGINT, signal.SIGTERM)))
    return run.wait(child)


def freeze(folder: Path, draw: random.Random) -> int | None:
    """Stop the process for a while, and start another one in the same folder meanwhile."""
    child = run.start(folder)
    _wait_for(folder, draw.randint(1, 8))
    _signal(child, signal.SIGSTOP)
    second = run.wait(run.start(folder))
    _signal(child, signal.SIGCONT)
    ended = run.wait(child)
    return ended if second in (run.REFUSED, run.FINISHED) else second


def fail(folder: Path, draw: random.Random) -> int | None:
    """One file operation fails: a full disk, revoked rights, a device error."""
    code, at = draw.choice(ERRORS), draw.randint(1, OPERATIONS)
    return run.wait(run.start(folder, Trap(at, partial(_raise, code)).set))


def fill_disk(folder: Path, draw: random.Random) -> int | None:
    """From some moment on, nothing can be written."""
    code, at = draw.choice((errno.ENOSPC, errno.EROFS)), draw.randint(1, OPERATIONS // 2)
    return run.wait(run.start(folder, Trap(at, partial(_raise, code), lasting=True, only="write").set))


def keep_old_files(folder: Path, draw: random.Random) -> int | None:
    """Old files can no longer be deleted; the run goes on to its end."""
    code, at = draw.choice((errno.EACCES, errno.EBUSY, errno.EIO)), draw.randint(1, 20)
    ended = run.wait(run.start(folder, Trap(at, partial(_raise, code), lasting=True, only="unlink").set))
    return ended if ended == run.FINISHED else run.CRASHED


def jump_clock(folder: Path, draw: random.Random) -> int | None:
    """The wall clock jumps by years, forwards or back, whenever it is read."""
    real = time.time

    def jump() -> None:
        time.time = lambda: real() + draw.uniform(-1e9, 1e9)

    ended = run.wait(run.start(folder, jump))
    return ended if ended == run.FINISHED else run.CRASHED


def start_two(folder: Path, draw: random.Random) -> int | None:
    """Two processes at once, of one seed or of two: one trains, the other is refused or finds the run finished."""
    seeds = (0, draw.choice((0, 1)))
    children = [run.start(folder, partial(time.sleep, draw.uniform(0, 0.05)), seed) for seed in seeds]
    ends = [run.wait(child) for child in children]
    if None in ends:
        return None
    if run.CRASHED in ends or run.FINISHED not in ends:
        return run.CRASHED
    if run.recorded_seed(folder) == 1:  # the other one won, and was compared in its own record
        shutil.rmtree(folder / "run")
        return run.wait(run.start(folder))
    return run.FINISHED


def damage(folder: Path, draw: random.Random) -> int | None:
    """Kill the run, then flip, cut, empty, or replace one of the files that it has written."""
    child = run.start(folder)
    _wait_for(folder, draw.randint(2, 9))
    _signal(child, signal.SIGKILL)
    ended = run.wait(child)
    if run.checkpoints(folder) >= 2:  # with one alone there is nothing to go back to
        _damage(draw.choice(_files(folder)), draw)
    return ended


def damage_finished(folder: Path, draw: random.Random) -> int | None:
    """The same to a run that has finished."""
    ended = run.wait(run.start(folder))
    _damage(draw.choice(_files(folder)), draw)
    return ended


def kill_export(folder: Path, draw: random.Random) -> int | None:
    """SIGKILL during the export of a finished run: the name holds what it held, or what a whole export writes."""
    ended, file = run.wait(run.start(folder)), folder / "net.tflite"
    before = draw.choice((b"", b"a file of the user's"))
    if before:
        file.write_bytes(before)
    at = draw.randint(1, EXPORT_OPERATIONS)
    run.wait(run.start(folder, Trap(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).set, work="export"))
    left = file.read_bytes() if file.exists() else b""
    if left == before:
        return ended
    whole = run.wait(run.start(folder, work="export"))
    return ended if whole == run.FINISHED and left == file.read_bytes() else run.CRASHED


def swap_images(folder: Path, draw: random.Random) -> int | None:
    """Swap images whose contents no fingerprint samples, in a killed run or a live one, and bring them back.

    Every image has been read by then. A run that was not refused has finished before.
    """
    child = run.start(folder, work="stream")
    _wait_for(folder, draw.randint(5, 9))
    if draw.random() < 0.5:
        _signal(child, signal.SIGKILL)
        run.wait(child)
        child = 0
    trained = sorted((folder / "images" / "train").glob("*/*"))
    sampled = set(evenly_spaced(len(trained), SAMPLED_FILES))
    for path in draw.sample([path for place, path in enumerate(trained) if place not in sampled], 8):
        content = path.read_bytes()
        path.write_bytes(content[:-64] + content[-64:][::-1])  # its 8x8 pixels, the last first
    ended = run.wait(child or run.start(folder, work="stream"))
    run.files(folder)
    refused = ended == run.REFUSED and re.search("more differ|was changed", run.said(folder))
    return ended if ended in (None, run.FINISHED) or refused else run.CRASHED


def move(folder: Path, draw: random.Random) -> int | None:
    """Move the directory of the run while it goes on, and back when it has ended."""
    child = run.start(folder)
    _wait_for(folder, draw.randint(0, 9))
    (folder / "run").rename(folder / "moved")
    ended = run.wait(child)
    if (folder / "run").exists():
        return run.CRASHED
    (folder / "moved").rename(folder / "run")
    return ended


def kill_worker(folder: Path, draw: random.Random) -> int | None:
    """SIGKILL to a process that reads images."""
    child = run.start(folder, work="stream")
    _wait_for(folder, draw.randint(0, 9))
    for _ in range(1000):  # between two epochs there is none
        if workers := Path(f"/proc/{child}/task/{child}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                _signal(int(draw.choice(workers)), signal.SIGKILL)
            break
        time.sleep(0.002)
    return run.wait(child)


def kill_rank(folder: Path, draw: random.Random) -> int | None:
    """SIGKILL to one of two processes that train together; the other ends by itself."""
    children = run.start_all(folder, "ranks")
    _wait_for(folder, draw.choice((0, 10)))
    time.sleep(draw.uniform(0, 0.2))
    _signal(children.pop(draw.randrange(2)), signal.SIGKILL)
    return run.wait_all(children)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("log", "held.lock"))


def _damage(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    how = draw.choice(DAMAGES)
    if how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif how in ("empty", "zero", "garbage", "deep"):
        other = {"empty": b"", "zero": bytes(len(content)), "garbage": draw.randbytes(99), "deep": b"[" * 99_999}
        path.write_bytes(other[how])
    else:
        path.unlink()
        {"directory": path.mkdir, "fifo": partial(os.mkfifo, path), "delete": lambda: None}[how]()


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


def _signal(child: int, number: int) -> None:
    os.kill(child, number)  # a process that has ended is still there until it is waited for


def _wait_for(folder: Path, iteration: int) -> None:
    end = time.monotonic() + run.PATIENCE / 2
    while run.newest(folder) < iteration and time.monotonic() < end:
        time.sleep(0.002)


KINDS: dict[str, tuple[int, Callable[[Path, random.Random], int | None]]] = {
    "kill": (6, kill),
    "kill twice": (2, kill_twice),
    "interrupt": (2, interrupt),
    "freeze": (1, freeze),
    "fail": (4, fail),
    "fill the disk": (2, fill_disk),
    "keep old files": (1, keep_old_files),
    "jump the clock": (1, jump_clock),
    "start two": (1, start_two),
    "damage": (5, damage),
    "damage a finished run": (4, damage_finished),
    "kill an export": (1, kill_export),
    "swap images": (2, swap_images),
    "move": (2, move),
    "kill a worker": (1, kill_worker),
    "kill a rank": (1, kill_rank),
}
"""Each kind of fault and how many of thirty-six are of it."""
WORK = {"swap images": "stream", "kill a worker": "stream", "kill a rank": "ranks"}
"""How the runs of a kind train, if not by `fault_run.train` in one process."""
