"""The list of all records."""

from __future__ import annotations

import ast

from tables.form import RESULTS, ROOT, markdown, record


def records() -> str:
    """Every record, its benchmark, hardware, version and date."""
    rows: list[list[object]] = []
    for path in sorted(RESULTS.glob("*.json")):
        found = record(path.name)
        known = found["runs"][-1]["environment"] if "runs" in found else found.get("environment", {})
        where, date = known.get("gpu") or known.get("cpu"), str(known.get("date", ""))[:10]
        rows.append([f"`{path.name}`", _purpose(path.stem), where or "", known.get("torch", ""), date])
    return markdown(["record", "<what is measured", "on", "torch", "date"], rows)


def _purpose(name: str) -> str:
    """The first sentence of the benchmark that writes a record of this name, or one that begins with its name."""
    names = [name, name.rpartition("_")[0]]
    places = [place for one in names for place in (f"{one}.py", f"{one}/__init__.py")]
    script = next((path for place in places if (path := ROOT / "benchmarks" / place).is_file()), None)
    text = ast.get_docstring(ast.parse(script.read_text())) if script else ""
    return (text or "").partition("\n")[0].rstrip(".")
