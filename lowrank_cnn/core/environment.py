"""Describe the hardware, versions and commit that a figure was measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from lowrank_cnn.core import __version__

_PACKAGES = ("triton", "lightning_fabric", "numpy", "onnxruntime")


def environment() -> dict[str, object]:
    """Describe this machine and the software on it, in values that JSON can hold."""
    return {
        "lowrank_cnn": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, marked `+` where it was changed; None if installed.

    LOWRANK_COMMIT goes before both: a tree that was copied elsewhere may have no history there, or an older one.
    """
    if given := os.environ.get("LOWRANK_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    head = _printed("git", "rev-parse", "--short=12", "HEAD", folder=root) if (root / ".git").exists() else None
    if not head:
        return None
    return head + ("+" if _printed("git", "status", "--porcelain", "--untracked-files=no", folder=root) else "")


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """A readable processor name; Linux knows it through lscpu, on Arm too."""
    lines = (_printed("lscpu") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache  # a process stays on its machine, and has loaded its code
def _printed(*command: str, folder: Path | None = None) -> str | None:
    """The output of a program; None if it is not installed, fails or takes longer than ten seconds."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's, on any device."""
    words = ("out of memory", "can't alloc", "cannot allocate memory", "not enough memory", "bad_alloc")
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(word in str(error).lower() for word in words)
