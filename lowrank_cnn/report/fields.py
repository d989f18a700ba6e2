"""Coerce untrusted JSON values to the type they should have; None if that is impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_TEXT = 200


def mapping(value: object) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return dict(value) if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    """A JSON array, or an empty one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def text(value: object) -> str | None:
    """A string (or a number written as one), cut where it is absurdly long."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip()[:LONGEST_TEXT] or None


def number(value: object, *, least: float = 0.0, most: float = 1e18) -> float | None:
    """A finite number within its bounds: NaN, infinities and the impossible are no measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not least <= value <= most:  # false for NaN as well
        return None
    return float(value)


def whole(value: object) -> int | None:
    """A count."""
    read = number(value)
    return None if read is None else int(read)


def share(value: object) -> float | None:
    """An accuracy, from 0 to 1."""
    return number(value, most=1.0)


def sizes(value: object) -> tuple[int, ...]:
    """The size of an image, or nothing where one of its numbers is not one."""
    read = [whole(item) for item in items(value)]
    return tuple(item for item in read if item is not None) if all(read) else ()


def first(values: Mapping[str, Any], *names: str) -> Any:
    """The first of several spellings that is there."""
    return next((values[name] for name in names if values.get(name) is not None), None)
