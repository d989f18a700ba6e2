"""Records of several runs: what was measured before stays, and a new run is put last."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lowrank_cnn.system.files import write_json


def earlier_runs(path: Path, kind: str) -> list[dict[str, Any]]:
    """The runs that a record holds already, oldest first."""
    found = json.loads(path.read_text()) if path.exists() else {"kind": kind, "runs": []}
    if found.get("kind") != kind or "runs" not in found:
        sys.exit(f"{path} is no record of runs of {kind}: name another file by --out.")
    return found["runs"]


def write_runs(path: Path, kind: str, runs: list[dict[str, Any]]) -> None:
    """The record; the file is whole at every moment."""
    write_json(path, {"kind": kind, "runs": runs})
