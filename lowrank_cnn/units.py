"""Numbers as a person reads them."""

from __future__ import annotations

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(number: float, digits: int = 3) -> str:
    """A count with its unit: 7508438696 -> 7.51G."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:#.{digits}g}".rstrip(".") + letter
    return f"{number:g}"
