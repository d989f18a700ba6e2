"""What carries over: the order of the networks and the gaps between them, published and ours.

Accuracies on another set of images cannot be compared one by one; their differences can. A gap of ours is judged
by its standard error over seeds: the deviation of a run is taken from all networks of the table together, since
two or three seeds of one network alone say little about it. All networks meet the same test images; what other
images would say of them is not in that error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import correlation, mean, variance
from typing import Any

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
MARGIN = 1.0
"""Percentage points within which the paper calls accuracies comparable."""
LITTLE = 2.0
"""Percentage points up to which it speaks of a small loss: its largest is 1.81."""
EXPECTED = {"above": (0.0, math.inf), "below": (-LITTLE, 0.0), "match": (-MARGIN, math.inf)}
"""Between which gaps in points a network is as expected."""

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t of a two-sided 95% interval, for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Question:
    """What the paper says of a network beside another: `above` it, a little `below` it, or a `match`."""

    text: str
    network: str
    base: str
    expected: str


_GMP, _JOIN = "vgg11-gmp", "vgg11-gmp-lr-join"
_WFULL, _LDE = "vgg11-gmp-lr-join-wfull", "vgg11-gmp-lr-lde"

QUESTIONS = (
    Question("global max-pooling beats vgg11's head", _GMP, "vgg11", "above"),
    Question("separable filters lose a little", "vgg11-gmp-sf", _GMP, "below"),
    Question("lr-join matches the dense network", _JOIN, _GMP, "match"),
    Question("lr matches the dense network", "vgg11-gmp-lr", _GMP, "match"),
    Question("lr-2x beats the dense network", "vgg11-gmp-lr-2x", _GMP, "above"),
    Question("wfull beats the dense network", _WFULL, _GMP, "above"),
    Question("wfull beats lr-join", _WFULL, _JOIN, "above"),
    Question("wfull beats GoogLeNet", _WFULL, "googlenet", "above"),
    Question("low-dimensional embeddings lose a little", _LDE, _GMP, "below"),
    Question("low-dimensional embeddings beat vgg11", _LDE, "vgg11", "above"),
    Question("GoogLeNet-lr matches GoogLeNet", "googlenet-lr", "googlenet", "match"),
    Question("nin-c3 matches nin", "nin-c3", "nin", "match"),
    Question("nin-c3-lr matches nin", "nin-c3-lr", "nin", "match"),
)


@dataclass(frozen=True)
class Scores:
    """A network in one measure: the published figure, and ours by seed. All are shares."""

    network: str
    published: float
    ours: tuple[float, ...]
    macs: int


@dataclass(frozen=True)
class Gap:
    """An answer: gaps in percentage points, the error of ours (None with single seeds), and the verdict.

    mac_ratio: what the network costs of its base here.
    """

    question: str
    network: str
    base: str
    expected: str
    published: float
    ours: float
    error: float | None
    mac_ratio: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Order:
    """How the order of n networks agrees with the published one: pairs in that order, and correlations."""

    n: int
    pairs: int
    alike: int
    rank_correlation: float | None
    linear_correlation: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def answers(scores: Sequence[Scores]) -> Iterator[Gap]:
    """The questions whose two networks are there, answered."""
    by_name = {score.network: score for score in scores}
    deviation, freedom = pooled_deviation([score.ours for score in scores])
    for question in QUESTIONS:
        if question.network in by_name and question.base in by_name:
            yield _answer(question, by_name, deviation, freedom)


def order(scores: Sequence[Scores]) -> Order:
    """Compare the order of our means with the published one."""
    stated, ours = [score.published for score in scores], [mean(score.ours) for score in scores]
    pairs = [(a, b) for a, b in combinations(range(len(scores)), 2) if stated[a] != stated[b]]
    alike = sum((stated[a] > stated[b]) == (ours[a] > ours[b]) and ours[a] != ours[b] for a, b in pairs)
    ranked = _correlation(_ranks(stated), _ranks(ours))
    return Order(len(scores), len(pairs), alike, ranked, _correlation(stated, ours))


def pooled_deviation(runs: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """The standard deviation of a run over seeds, from all networks with several, and its degrees of freedom."""
    several = [values for values in runs if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return None, 0
    return math.sqrt(sum((len(values) - 1) * variance(values) for values in several) / freedom), freedom


def judge(expected: str, gap: float, error: float | None, freedom: int) -> str:
    """Whether a gap in points is as expected, to 95%: one whose interval reaches both sides is undecided."""
    if error is None:
        return UNDECIDED
    reach, (least, most) = error * t95(freedom), EXPECTED[expected]
    if least < gap - reach and gap + reach < most:
        return HOLDS
    return FAILS if gap + reach < least or gap - reach > most else UNDECIDED


def t95(freedom: int) -> float:
    """Student's t; beyond the table, its approach to the normal distribution's 1.96."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom


def _answer(question: Question, by_name: Mapping[str, Scores], deviation: float | None, freedom: int) -> Gap:
    one, base = by_name[question.network], by_name[question.base]
    ours = 100 * (mean(one.ours) - mean(base.ours))
    error = None
    if deviation is not None:
        error = 100 * deviation * math.sqrt(1 / len(one.ours) + 1 / len(base.ours))
    return Gap(
        question=question.text,
        network=one.network,
        base=base.network,
        expected=question.expected,
        published=100 * (one.published - base.published),
        ours=ours,
        error=error,
        mac_ratio=one.macs / base.macs,
        verdict=judge(question.expected, ours, error, freedom),
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Places from 1 up; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [mean(place for place, other in enumerate(ordered, 1) if other == value) for value in values]


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return correlation(one, other)
