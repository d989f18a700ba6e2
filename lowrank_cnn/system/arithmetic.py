"""Whole-number arithmetic that Python lacks."""

from __future__ import annotations


def ceil_div(value: int, step: int) -> int:
    """The quotient, rounded up.

    >>> ceil_div(7, 3)
    3
    """
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`.

    >>> round_up(7, 3)
    9
    """
    return ceil_div(value, step) * step
