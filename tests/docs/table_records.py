"""What the tests of the documentation's tables share: a machine for made-up records, and the cells of a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"gpu": None, "cpu": "some cores", "torch": "9.9", "commit": "abc", "timm": "1", "torchvision": "2"}

Put = Callable[[str, dict[str, Any]], None]
"""Writes a record to where the tables look for it."""


def cells(text: str, start: str) -> list[str]:
    """The cells of the line that begins with this one."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]
