"""Numbers and tables as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(number: float, digits: int = 3) -> str:
    """A count with its unit: 7508438696 -> 7.51G."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:#.{digits}g}".rstrip(".") + letter
    return f"{number:g}"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in plain text; a column whose heading begins with > is set to the right."""
    right = [heading.startswith(">") for heading in columns]
    lines = [[heading.lstrip(">") for heading in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
