"""Every transform on the networks of other libraries."""

from __future__ import annotations

from typing import Any

from tables.form import JsonRecord, from_record, markdown, source

STEPS = ("counted", "converted", "decomposed", "merged", "planned", "optimised", "exported")
PACKAGES = ("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch")
WRONG, REFUSED = ("WRONG", "RAW"), "refused"
"""How the cells of wrong results, errors and refusals begin."""


@from_record("foreign.json")
def summary(found: JsonRecord) -> str:
    """A row per library: how many of its networks each transform takes."""
    environment, lines = found["environment"], []
    results = {row["name"]: [_cell(row, step) for step in STEPS] for row in found["rows"]}
    for library in PACKAGES:
        mine = [cells for name, cells in results.items() if name.startswith(f"{library}:")]
        taken = [sum(not cell.startswith((*WRONG, REFUSED)) for cell in step) for step in zip(*mine, strict=True)]
        lines.append([f"{library} {environment[library]}", len(mine), *taken])
    every = [cell for cells in results.values() for cell in cells]
    wrong, refused = (sum(cell.startswith(kind) for cell in every) for kind in (WRONG, REFUSED))
    note = f"\n{len(results)} networks, {len(every)} results: {wrong} wrong or failed, {refused} refused.\n"
    return markdown(["library", "networks", *STEPS], lines) + note + source("foreign.json", environment)


@from_record("foreign.json")
def foreign(found: JsonRecord) -> str:
    """A row per network: what each transform gave, or that it refused."""
    rows = [[row["name"], *(_cell(row, step) for step in STEPS)] for row in found["rows"]]
    note = (
        "\nErrors are the largest difference of any output over the largest value of that output, against the "
        "original.\n"
    )
    columns = ["network", *(f"<{step}" for step in STEPS)]
    return markdown(columns, rows) + note + _reasons(found["rows"]) + source("foreign.json", found["environment"])


def _reasons(rows: list[dict[str, Any]]) -> str:
    """Each message that a transform gave instead of a result, with the networks concerned."""
    told: dict[str, list[str]] = {}
    for row in rows:
        for step in STEPS:
            result, _, reason = row["cells"].get(step, "").partition(": ")
            if reason:
                what = "refused" if result == REFUSED else "in part"
                told.setdefault(f"{step}, {what}: {reason}", []).append(f"`{row['name'].partition(':')[2]}`")
    lines = (f"- {sentence} ({', '.join(names)})" for sentence, names in told.items())
    return "\n" + "\n".join(lines) + "\n\n" if told else ""


def _cell(row: dict[str, Any], step: str) -> str:
    """The result without the sentence that follows it."""
    return row["cells"].get(step, row["cells"].get("built", "")).partition(":")[0]
