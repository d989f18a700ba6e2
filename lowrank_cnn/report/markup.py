"""HTML from values: everything that is not markup made here is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass


class Markup(str):
    """Text that is already HTML. Only this module and its callers' literals make it."""

    __slots__ = ()


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, what it is sorted by (None sorts last), and a second line in small print."""

    shown: str
    value: float | str | None = None
    small: str = ""


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers stand to the right and are sorted as such."""

    heading: str
    numeric: bool = True
    help: str = ""


def escape(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, *children: object, **attributes: str | bool | None) -> Markup:
    """An element; an attribute `class_` is written `class`, and one that is None or False is left out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children)}</{name}>")


def _attribute(key: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def join(parts: Sequence[object]) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, sortable: bool = True
) -> Markup:
    """A table in a box of its own that scrolls where the page is too narrow."""
    head = tag("tr", *(_heading(column, sortable) for column in columns))
    body = [tag("tr", *(_cell(c, cell) for c, cell in zip(columns, row, strict=True))) for row in rows]
    name = tag("caption", caption)
    inner = tag("table", name, tag("thead", head), tag("tbody", *body), data_sortable=sortable)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _heading(column: Column, sortable: bool) -> Markup:
    label = tag("button", column.heading, type="button") if sortable else column.heading
    classes = "number" if column.numeric else None
    return tag("th", label, scope="col", class_=classes, title=column.help or None)


def _cell(column: Column, cell: Cell) -> Markup:
    small = tag("small", cell.small) if cell.small else ""
    value = None if cell.value is None else str(cell.value)
    return tag("td", cell.shown, small, class_="number" if column.numeric else None, data_value=value)


def embed(data: object) -> Markup:
    """JSON that can stand inside a script element: no text in it can end that element or open a comment."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Markup(written)
