"""Read and write files safely: replace a file in one move, and read regular files of bounded size only.

`replacing` writes every output, and `open_regular` opens every input. Both refuse devices and pipes. A link inside
a folder may be somebody else's: it is read, but nothing is written through it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.processes import first_process

LARGEST_JSON = 64 * 2**20
"""Bytes of the largest JSON file that is read; the longest training records take less than a tenth."""
_SPECIAL = "Not a regular file"
_TEMPORARY = ".tmp-"
# Without O_NONBLOCK, opening a FIFO waits for its other end. Windows has none of these but O_BINARY.
_NONBLOCK, _NOFOLLOW, _BINARY = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"))


class UnreadableError(LowRankError):
    """A file that cannot be read as what it should be. The message says why, without the file's name."""


@contextlib.contextmanager
def replacing(path: Path, *, parents: bool = True) -> Iterator[Path]:
    """Give a temporary path to write to, which then replaces `path` in one move.

    The content is on disk before the move. A failure leaves what was there, and raises `LowRankError`. A device, a
    pipe or a folder is refused, behind a link too. A link to a file is replaced, and that file stays as it is.
    `parents` makes the folder if it is not there.

        with replacing(Path("table.csv")) as temporary:
            temporary.write_text("a,b")
    """
    # A name that nobody can guess: a link in a folder from somebody else cannot wait for it.
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}{path.suffix[:16]}")
    try:
        try:
            _check_place(path)
            if parents:
                path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise LowRankError(why_not_written(path, error)) from error


def write_atomically(path: Path, payload: bytes, *, parents: bool = True) -> None:
    """Replace a file's content in one move; a failure leaves what was there. `-` is standard output."""
    if str(path) == "-":
        sys.stdout.write(payload.decode())
        return
    with replacing(path, parents=parents) as temporary:
        temporary.write_bytes(payload)


def open_in_place(path: Path) -> int:
    """Open a file inside a folder for reading and writing, made if absent, and not truncated: its descriptor.

    A file with a second name would change under that name too: it is refused, as links, devices and pipes are.
    """
    try:
        _check_place(path, links=False)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NONBLOCK | _NOFOLLOW | _BINARY, 0o666)
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1:  # 0 if another process has just deleted it
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, _SPECIAL, str(path))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ELOOP):
            raise
        raise LowRankError(
            f"{path} is a link, has a second name or is no regular file: remove it, or choose another folder."
        ) from error


def followed(path: Path) -> Path:
    """The file that a path of the user's own leads to: such a link is written through, unlike those in folders."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def below(folder: Path, path: Path) -> Path:
    """A path below a folder, to write to; a link on the way that leads elsewhere is refused."""
    if Path(os.path.realpath(path)) != Path(os.path.realpath(folder), path.relative_to(folder)):
        raise LowRankError(f"a link leads from {path} elsewhere: remove it, or choose another {option('out')}.")
    return path


def write_json(path: Path, value: object, *, parents: bool = True) -> None:
    """Write a JSON file that people can read too, in one move."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode(), parents=parents)


def clear_temporaries(directory: Path) -> None:
    """Remove temporary files and folders of a process that was killed while writing."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        delete(path)


def set_aside(path: Path) -> bool:
    """Rename an obstacle to `NAME.damaged`, or `NAME.damaged-1` and so on; nothing is deleted."""
    places = (path.with_name(f"{path.name}.damaged{f'-{n}' if n else ''}") for n in itertools.count())
    free = next(place for place in places if not os.path.lexists(place))
    try:
        path.rename(free)
    except OSError:
        return False
    return True


def delete(path: Path) -> bool:
    """Delete a file if the system allows it. A file that stays costs space and is no reason to stop."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def open_regular(path: str | Path, *, most: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most this many bytes for reading.

    A FIFO would block, and a device may have no end: both raise `OSError`, as does a larger file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY)
    except ValueError as error:  # no path has a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the file itself may be whole
            told = f"too many files are open: use fewer {option('workers')}, or `ulimit -n 4096`."
            raise LowRankError(told) from error
        raise
    try:
        about = os.fstat(descriptor)  # of what was opened: the path may lead elsewhere by now
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, _SPECIAL, str(path))
        if most is not None and about.st_size > most:
            raise OSError(errno.EFBIG, f"Larger than {most / 2**20:g} MiB", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, *, most: int) -> bytes:
    """The content of a regular file of at most this many bytes; anything else raises `OSError`."""
    with open_regular(path, most=most) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
    if len(content) > size:  # it grows, or the file system states no sizes, as that of /proc
        raise OSError(errno.EINVAL, "It changed while it was read", str(path))
    return content


def read_text(path: Path, *, most: int) -> str:
    """The UTF-8 text of a regular file, its lines ended by `\\n`; a mark at its beginning is left out."""
    return io.TextIOWrapper(io.BytesIO(read_regular(path, most=most)), "utf-8-sig").read()


def regular(path: Path) -> Path:
    """The path of a regular file, for a library that opens files by name; `OSError` for anything else."""
    open_regular(path).close()
    return path


def is_regular(path: str | Path) -> bool:
    """Whether the path leads to a regular file, through links too; False if the system does not let us look."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises where a folder may not be searched


def read_json(path: Path) -> Any:
    """The value in a JSON file. Anything else raises `UnreadableError`: damage, depth, size, a missing file."""
    try:
        content = read_regular(path, most=LARGEST_JSON)
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror or error})") from error
    return parse_json(content)


def parse_json(content: bytes) -> Any:
    """The value that JSON text holds, or `UnreadableError`."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise UnreadableError("it is not JSON that can be read: it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON, from line {error.lineno} on") from error
    except ValueError as error:  # no UTF-8, or a number of more digits than Python reads
        raise UnreadableError("it is not JSON") from error


def as_path(source: str | os.PathLike[str]) -> Path:
    """A path that the system can look up, with `~` expanded; else `LowRankError`."""
    try:
        path = Path(source).expanduser()
        path.exists()
        if b"\0" in os.fsencode(path):
            raise ValueError("it contains a null character")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise LowRankError(f"{str(source)!r:.80} cannot be a path ({why}).") from error
    return path


def _check_place(path: Path, *, links: bool = True) -> None:
    """Refuse to write where a device, a pipe or a folder is; or a link, if those are no place to write to."""
    try:
        mode = (path.stat() if links else path.lstat()).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _SPECIAL, str(path))


def _sync(path: Path) -> None:
    """Force a file, or a directory's list of names, to disk; systems that cannot open directories need not."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_written(path: Path, error: OSError) -> str:
    """The sentence for a file that the system does not let us write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {path} could not be written. What was there before is whole; free some space and "
            f"start again (training goes on with {option('resume', True)})."
        )
    if error.errno == errno.ENOENT:
        return (
            f"{path} could not be written: its folder was moved or deleted (training goes on with "
            f"{option('resume', True)} in the folder's new place)."
        )
    return f"{path} could not be written ({error.strerror or error})."


# Seal JSON objects with a checksum of their values, so that damage is noticed when they are read.

SEAL = "sha256"
"""The key that holds the checksum of all other values."""


class BrokenSealError(LowRankError):
    """The values are not those that were sealed."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their checksum, which does not depend on the order of keys or on spaces in the file."""
    values = json.loads(json.dumps(values))  # as they will be read: keys become text
    return {**values, SEAL: _checksum(values)}


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without their checksum, which must fit them; values that have none are returned as they are."""
    content = {key: value for key, value in values.items() if key != SEAL}
    if SEAL in values and values[SEAL] != _checksum(content):
        raise BrokenSealError("its checksum is not the one that was written")
    return content


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# Let one process at a time use a directory. The system drops the lock when that process ends, however it ends: a
# run that was killed can be resumed at once.

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "held.lock"
_ours: dict[tuple[int, str], int] = {}
"""The thread that holds a directory, by process and path: the system's locks do not tell threads apart."""
_ours_changing = threading.Lock()


class HeldError(LowRankError):
    """Another process, or another thread of this one, uses the directory."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory while the block lasts; `HeldError` if another process or thread holds it.

    A directory that is not there is made, and removed again if nothing was put into it. A thread that holds the
    directory already may enter again. The first of torchrun's processes holds it for all. On a file system without
    locks, nothing is held.
    """
    owner = (os.getpid(), str(directory.absolute()))
    if not first_process() or _ours.get(owner) == threading.get_ident():
        yield
        return
    with _ours_changing:
        if owner in _ours:
            raise HeldError(f"{directory} is in use by another thread: wait, or choose another {option('out')}.")
        _ours[owner] = threading.get_ident()
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    descriptor = None
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LowRankError(f"the directory {directory} cannot be made ({error.strerror or error}).") from error
        descriptor = _open_locked(directory / LOCK)
        yield
    finally:
        if descriptor is not None:
            delete(directory / LOCK)  # before it is closed: who has opened it finds it gone, and opens another
            os.close(descriptor)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        del _ours[owner]


def _open_locked(path: Path) -> int | None:
    """The descriptor of the locked file; None if nothing can be locked, as on a read-only disk.

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
            number = os.pread(descriptor, 20, 0)
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            holder = f" ({int(number)})" if number.isdigit() else ""
            raise HeldError(
                f"{path.parent} is in use by another process{holder}: wait until it ends, or choose another "
                f"{option('out')}."
            ) from error
        with contextlib.suppress(OSError):  # the file is gone, or the disk too full for the number
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                with contextlib.suppress(OSError):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        os.close(descriptor)
    return None
