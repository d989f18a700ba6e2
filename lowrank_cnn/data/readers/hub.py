"""Sets of the Hugging Face Hub, fetched as parquet shards into its own cache."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowrank_cnn.system.errors import LowRankError, nearest, require

STALL_SECONDS = 60.0
"""A download that receives nothing for this long is stopped; its total time is not limited."""
ATTEMPTS = 2
_LOOK_SECONDS = 0.5
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# ILSVRC's test images come without labels: 13 GB that nothing here could use.
_WANTED = {"ILSVRC/imagenet-1k": ("data/train-*.parquet", "data/validation-*.parquet")}


class StalledError(Exception):
    """The server accepted the connection and then sent nothing."""


def is_repository(source: str) -> bool:
    """Whether the text has the form `owner/name`."""
    return _REPOSITORY.fullmatch(source) is not None


def download_shards(repository: str) -> Path:
    """The local folder of the set's shards, downloaded where they are not cached yet.

    Its progress is shown by huggingface_hub. A mistyped local path is not looked up on the Hub.
    """
    _check_not_local(repository)
    hub = require("huggingface_hub", extra="data", purpose="fetching a set from the Hub")
    wanted = list(_WANTED.get(repository, ("*.parquet",)))

    def download(**options: Any) -> str:
        return hub.snapshot_download(repository, repo_type="dataset", allow_patterns=wanted, **options)

    try:
        return Path(_answered(download, _cache_of(hub, repository)))
    except Exception as error:  # network, permission, disk and unknown names have no common ancestor
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise LowRankError(
            f"{repository} is no local folder and cannot be fetched from the Hub ({lines[0].rstrip('.')}): "
            "check its name, the network, and for a gated set that you are logged in."
        ) from error


def _check_not_local(source: str) -> None:
    """Refuse `photos/trian` where there is a folder `photos`: the name of a local folder was mistyped."""
    folder = Path(source).parent
    if not folder.is_dir():
        return
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
    there = nearest(Path(source).name, names) if names else f"{folder} holds no folders."
    raise LowRankError(
        f"there is no folder {source}; {there} A set of the Hub is not looked up by the name of a local folder."
    )


def _answered(download: Callable[..., str], cache: Path) -> str:
    """Download, again if the server falls silent, and at last take the copy that a run before has cached."""
    for _ in range(ATTEMPTS):
        try:
            return _watched(download, cache)
        except StalledError:
            continue
    try:
        return download(local_files_only=True)
    except Exception as error:
        raise StalledError(f"the server has sent nothing for {STALL_SECONDS:g} s") from error


def _watched(download: Callable[..., str], cache: Path) -> str:
    """Run a download in a thread, for as long as the files in the cache grow.

    Time-outs of the library's own do not cover all of its requests.
    """
    done: dict[str, Any] = {}

    def work() -> None:
        try:
            done["folder"] = download()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    size, since = _size(cache), time.monotonic()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if (now := _size(cache)) != size:
            size, since = now, time.monotonic()
        if thread.is_alive() and time.monotonic() - since > STALL_SECONDS:
            raise StalledError
    if "error" in done:
        raise done["error"]
    return done["folder"]


def _cache_of(hub: Any, repository: str) -> Path:
    """Where huggingface_hub keeps the files of a data set."""
    return Path(hub.constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}"


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, those that are still growing too."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total
