"""Every transform on the networks of other libraries."""

from __future__ import annotations

import re
from typing import Any

from tables.form import JsonRecord, from_record, markdown, source

STEPS = ("counted", "converted", "decomposed", "merged", "planned", "optimised", "exported")
PACKAGES = ("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch")


@from_record("foreign.json")
def foreign(found: JsonRecord) -> str:
    """A row per network: what each transform gave, or that it refused."""
    rows = [[_breakable(row["name"]), *(_cell(row, step) for step in STEPS)] for row in found["rows"]]
    cells = [row["cells"].get(step, "") for row in found["rows"] for step in STEPS]
    wrong = sum(cell.startswith(("WRONG", "RAW")) for cell in cells)
    refused = sum(cell.startswith("refused") for cell in cells)
    environment = found["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in PACKAGES)
    note = (
        f"\n{len(rows)} networks, {len(cells)} results: {wrong} wrong or failed, {refused} refused.\n"
        "Errors are the largest difference of any output over the largest value of that output, against the "
        f"original.\n{versions}.\n"
    )
    columns = ["network", *(f"<{step}" for step in STEPS)]
    return markdown(columns, rows) + note + _reasons(found["rows"]) + source("foreign.json", environment)


def _breakable(name: str) -> str:
    """A long name with places where a narrow table may break it."""
    return re.sub(r"(?<=[a-z0-9:])(?=[A-Z_])|(?<=:)", "<wbr>", name)


def _reasons(rows: list[dict[str, Any]]) -> str:
    """Each message that a transform gave instead of a result, with the networks concerned."""
    told: dict[str, list[str]] = {}
    for row in rows:
        for step in STEPS:
            result, _, reason = row["cells"].get(step, "").partition(": ")
            if reason:
                what = "refused" if result == "refused" else "in part"
                told.setdefault(f"{step}, {what}: {reason}", []).append(f"`{row['name'].partition(':')[2]}`")
    lines = (f"- {sentence} ({', '.join(names)})" for sentence, names in told.items())
    return "\n" + "\n".join(lines) + "\n\n" if told else ""


def _cell(row: dict[str, Any], step: str) -> str:
    """The result without the sentence that follows it."""
    return row["cells"].get(step, row["cells"].get("built", "")).partition(":")[0]
