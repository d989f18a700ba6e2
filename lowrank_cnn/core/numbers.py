"""Whole-number arithmetic, and statistics of results from a few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lowrank_cnn.core.errors import require

_MANY_IMAGES = 5000
"""With so many images the interval of an accuracy is less than a point wide on either side."""


def ceil_div(value: int, step: int) -> int:
    """The quotient, rounded up."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return ceil_div(value, step) * step


def mean(values: Sequence[float]) -> float | None:
    """The mean; None for no values."""
    return statistics.fmean(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """The standard deviation within groups, from all groups of several values, and its degrees of freedom."""
    several = [values for values in groups if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return None, 0
    squares = sum((len(values) - 1) * statistics.variance(values) for values in several)
    return math.sqrt(squares / freedom), freedom


def student_t(p: float, freedom: float) -> float:
    """The quantile of Student's t distribution."""
    return float(_special().stdtrit(freedom, p))


def student_p(t: float, freedom: float) -> float:
    """The probability that Student's t lies below a value."""
    return float(_special().stdtr(freedom, t))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a sample with the ends of its 95% interval by Student's t; a single value has no width."""
    centre = statistics.fmean(values)
    spread = deviation(values)
    if spread is None:
        return centre, centre, centre
    reach = student_t(0.975, len(values) - 1) * spread / math.sqrt(len(values))
    return centre, centre - reach, centre + reach


def wilson(share: float, n: int) -> tuple[float, float]:
    """The ends of Wilson's (1927) 95% interval of a share of n trials."""
    z = 1.96
    centre, reach = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (centre - reach) / (1 + z * z / n), (centre + reach) / (1 + z * z / n)


def accuracy(share: float, n: int) -> str:
    """An accuracy on n images, with its 95% interval if they are few.

    >>> accuracy(0.912, 250), accuracy(0.912, 10000)
    ('91.20% (87.0 to 94.1)', '91.20%')
    """
    if not 0 < n < _MANY_IMAGES:
        return f"{share:.2%}"
    low, high = (max(0.0, end) for end in wilson(share, n))  # rounding gives -0
    return f"{share:.2%} ({100 * low:.1f} to {100 * high:.1f})"


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected after Holm (1979): the chance of any false claim stays below the level of the test."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's r; None where it is undefined: fewer than two values, or all equal."""
    try:
        return statistics.correlation([float(v) for v in one], [float(v) for v in other])
    except statistics.StatisticsError:
        return None


def _special() -> Any:
    return require("scipy.special", extra="train", purpose="judging accuracies over several seeds")
