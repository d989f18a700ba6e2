"""Let one process at a time use a directory.

The operating system holds the lock for a process and drops it when that process ends, however it ends. A run that
was killed can therefore be continued at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import open_in_place
from lowrank_cnn.system.processes import first_process

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "held.lock"
_CONTESTED = (errno.EACCES, errno.EAGAIN)
_ours: dict[tuple[int, str], int] = {}
"""The thread that holds a directory, by process and path: the system's locks do not tell threads apart."""
_ours_changing = threading.Lock()


class HeldError(LowRankError):
    """Another process, or another thread of this one, uses the directory."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory while the block lasts, and make it if it is not there; `HeldError` if another holds it.

    A thread that holds the directory already may enter again. Of the processes that torchrun starts for one run,
    the first holds it for all. Where a file system has no locks, nothing is held.

        with locked(Path("runs/first")):
            train()
    """
    owner = (os.getpid(), str(directory.absolute()))
    if not first_process() or _ours.get(owner) == threading.get_ident():
        yield
        return
    with _ours_changing:
        if owner in _ours:
            raise HeldError(f"{directory} is in use by another thread: wait for it, or choose another --out.")
        _ours[owner] = threading.get_ident()
    try:
        with _made(directory), _lock_file(directory / LOCK):
            yield
    finally:
        del _ours[owner]


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Make a directory, and remove it again if nothing was put into it."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LowRankError(f"the directory {directory} cannot be made ({error.strerror or error}).") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        if descriptor is not None:
            # While it is held: whoever has opened this file finds that it is gone, and opens another.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    """The descriptor of the locked file; None where there is nothing to lock with, as on a read-only disk.

    It is locked by `lockf`, not `flock`: a child process that outlives this one would keep the latter.
    """
    while fcntl is not None:
        try:
            descriptor = open_in_place(path)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno not in _CONTESTED:
                return None
            raise HeldError(
                f"{path.parent} is in use by another process{holder}: wait until it ends, or choose another --out."
            ) from error
        if _is_at(path, descriptor):
            with contextlib.suppress(OSError):  # a full disk, say: the number is only for the message
                os.truncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one that the path names."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        number = os.pread(descriptor, 20, 0)
        if number.isdigit():
            return f" ({int(number)})"
    return ""
