"""Numbers, tables and foreign text as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters, halves of surrogate pairs, and marks that reorder the text around them."""
TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(number: float) -> str:
    """A count with its unit: 7508438696 -> 7.51G."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:#.3g}".rstrip(".") + letter
    return f"{number:g}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, which takes an s or es unless the number is 1: `1 image`, `2 classes`."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def first_few(names: Sequence[str]) -> str:
    """Three names at most: "cat, dog, owl, ..."."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def percent(share: float | None) -> str:
    """A share as a percentage, a dash where it is unknown: 0.9012 -> 90.12%."""
    return DASH if share is None else f"{100 * share:.2f}%"


def points(value: float) -> str:
    """A difference in percentage points."""
    return f"{value:+.2f}".replace("-", MINUS)


def ratio(value: float) -> str:
    """A share of the dense twin's cost."""
    return f"{TIMES}{value:.3f}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours: 12.5 s, 8.4 min, 2.0 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters become escapes, but for line ends and tabs.

    Escape sequences in a class name or a file name could rewrite the screen, and marks of the direction of writing
    could reorder it. Half of a surrogate pair cannot be printed at all.
    """
    return _HARMFUL.sub(lambda one: one[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A table for notebooks; a column whose heading begins with > is set to the right. All text is escaped."""
    sides = ["right" if heading.startswith(">") else "left" for heading in columns]

    def line(cells: Sequence[object], tag: str) -> str:
        made = (
            f'<{tag} style="text-align:{side}">{escape(printable(str(cell)))}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = line([heading.lstrip(">") for heading in columns], "th")
    body = "".join(line(row, "td") for row in rows)
    title = f"<caption>{escape(printable(caption))}</caption>" if caption else ""
    return f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"


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


def p_value(p: float) -> str:
    """A p-value with four digits. It is never exactly zero."""
    return f"{p:.4f}" if p >= 1e-4 else "< 0.0001"
