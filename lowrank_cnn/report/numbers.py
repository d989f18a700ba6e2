"""Numbers as the page and the figures write them."""

from __future__ import annotations

TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.2f}%"


def percent_tick(share: float, _place: object = None) -> str:
    """A percentage on an axis, without digits that say nothing."""
    return f"{100 * share:.6g}%"


def points(value: float) -> str:
    """A difference in percentage points."""
    return f"{value:+.2f}".replace("-", MINUS)


def ratio(value: float) -> str:
    """A share of the dense twin's cost."""
    return f"{TIMES}{value:.3f}"


def as_shown(cost: float) -> float:
    """A cost to the three digits that are shown: a hair's breadth below them saves nothing."""
    return float(f"{cost:.3g}")
