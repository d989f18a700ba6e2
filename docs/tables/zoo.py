"""Every network of timm and torchvision, converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tables.form import JsonRecord, from_record, markdown, source

OUTCOMES = ("converted", "counted", "nothing to convert", "failed", "not reached")
"""Converted networks also ran; networks that were only counted are too large to run."""


@from_record("zoo.json")
def zoo(found: JsonRecord) -> str:
    """A summary of all networks of timm and torchvision: outcomes, and all failures."""
    parts = [_outcomes(found["networks"]), *_failures(found["networks"])]
    versions = ", ".join(f"{name} {found['environment'][name]}" for name in ("timm", "torchvision"))
    note = f"\nScheme `{found['scheme']}`; {versions}. Every network has a line in the record.\n"
    return "\n".join(parts) + note + source("zoo.json", found["environment"])


def _outcomes(networks: list[dict[str, Any]]) -> str:
    counts = Counter((row["network"].partition(":")[0], row["outcome"]) for row in networks)
    there = [outcome for outcome in OUTCOMES if any(found == outcome for _, found in counts)]
    families = dict.fromkeys(row["network"].partition(":")[0] for row in networks)
    rows: list[list[object]] = []
    for family in families:
        mine = [counts[family, outcome] for outcome in there]
        rows.append([family, sum(mine), *mine])
    return markdown(["", "networks", *there], rows)


def _failures(networks: list[dict[str, Any]]) -> Iterator[str]:
    """Networks that failed for the same reason share a line."""
    reasons: dict[str, list[str]] = {}
    for row in networks:
        if row["outcome"] == "failed":
            reasons.setdefault(row["why"], []).append(f"`{row['network']}`")
    if reasons:
        rows: list[list[object]] = [[", ".join(names), f"`{_escaped(why)}`"] for why, names in reasons.items()]
        yield markdown(["failed", "<why"], rows)


def _escaped(text: str) -> str:
    """In a cell, a bar would end it and a backtick the code."""
    return text.replace("|", "\\|").replace("`", "'")
