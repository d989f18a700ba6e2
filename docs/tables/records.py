"""The list of all records."""

from __future__ import annotations

from tables.form import RESULTS, markdown, record


def records() -> str:
    """The records of each machine."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        known = record(path.name)
        known = known["runs"][-1]["environment"] if "runs" in known else known.get("environment", {})
        machine = known.get("gpu") or known.get("cpu") or "", known.get("torch", "")
        found.setdefault(machine, []).append(f"`{path.stem}`")
    rows = [[*machine, ", ".join(names)] for machine, names in found.items()]
    return markdown(["newest run on", "<torch", "<records"], rows)
