"""Run things once in child processes, several at a time, so a failure or hang ends only its process."""

from __future__ import annotations

import subprocess
import sys
import time


def try_all(
    script: str, names: list[str], batch: int, jobs: int, deadline: float
) -> tuple[set[str], dict[str, str]]:
    """Run every `layer/tile` once in child processes; those that end a process are named, the rest retried."""
    ran: set[str] = set()
    failed: dict[str, str] = {}
    waiting = [names[i::jobs] for i in range(jobs)]
    while any(waiting) and time.monotonic() < deadline:
        children = [(share, _child(script, share, batch)) for share in waiting if share]
        waiting = []
        for share, child in children:
            left = max(5.0, min(150.0, deadline - time.monotonic()))
            try:
                text, _ = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                child.kill()
                text, _ = child.communicate()
            waiting.append(_read(share, text, ran, failed))
    return ran, failed


def _child(script: str, share: list[str], batch: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", script, "--batch", str(batch), "--try", ",".join(share)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _read(share: list[str], text: str, ran: set[str], failed: dict[str, str]) -> list[str]:
    """Sort a child's report: the task at which it ended failed; the tasks after it are returned."""
    tried = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        name, _, reason = rest.partition(" ")
        if word == "trying":
            tried.append(name)
        elif word == "ran":
            ran.add(name)
        elif word == "failed":
            failed[name] = reason
    for name in tried:
        if name not in ran:
            failed.setdefault(name, "ended or stopped its process: " + text[-300:])
    return [name for name in share if name not in tried] if tried else []
