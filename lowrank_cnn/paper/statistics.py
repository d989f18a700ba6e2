"""Compare accuracy gaps between networks with the paper's claims.

Absolute accuracies on another data set cannot be compared with the published ones; differences can. The standard
error of a gap comes from the spread over seeds. Two or three seeds of one network say little about that spread, so
it is pooled over all networks trained by the same recipe, never across recipes. All networks see the same test
images; the error does not include what other test images would give. Verdicts on several claims about the same
runs are corrected for their number (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import correlation, mean, variance
from typing import Any

from lowrank_cnn.paper.claims import ACCURACY_CLAIMS, EXPECTED, AccuracyClaim
from lowrank_cnn.system.errors import require

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
ALPHA = 0.025
"""One-sided error rate of all verdicts on one set of runs together."""


@dataclass(frozen=True)
class Scores:
    """A network in one measure: the published figure, and ours by seed, as shares; `recipe` trained all seeds."""

    network: str
    published: float | None
    ours: tuple[float, ...]
    macs: int
    recipe: str = ""


@dataclass(frozen=True)
class Gap:
    """The answer to one claim. Gaps, the standard error and the 95% half-width are percentage points.

    `error` and `half_width` are None for single seeds. `p` is the smaller of the one-sided p-values of "holds" and
    "does not hold", after correction. `mac_ratio` is what the network costs here, divided by its base.
    """

    question: str
    network: str
    base: str
    expected: str
    published: float | None
    ours: float
    error: float | None
    half_width: float | None
    mac_ratio: float
    p: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankAgreement:
    """How far the order of n networks agrees with the published order: pairs in that order, and correlations."""

    n: int
    pairs: int
    alike: int
    rank_correlation: float | None
    linear_correlation: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def answer_claims(scores: Mapping[str, Sequence[Scores]]) -> dict[str, list[Gap]]:
    """The gaps by measure for all claims whose two networks were trained; verdicts are corrected together."""
    found = [(measure, gap) for measure, rows in scores.items() for gap in _gaps(measure, rows)]
    corrected = _corrected([gap for _, gap in found])
    answers: dict[str, list[Gap]] = {measure: [] for measure in scores}
    for (measure, _), gap in zip(found, corrected, strict=True):
        answers[measure].append(gap)
    return answers


def rank_agreement(scores: Sequence[Scores]) -> RankAgreement:
    """Compare the order of our means with the published one."""
    rated = [(score.published, mean(score.ours)) for score in scores if score.published is not None]
    stated, ours = [published for published, _ in rated], [our for _, our in rated]
    pairs = [(a, b) for a, b in combinations(range(len(rated)), 2) if stated[a] != stated[b]]
    alike = sum((stated[a] > stated[b]) == (ours[a] > ours[b]) and ours[a] != ours[b] for a, b in pairs)
    ranked = _correlation(_ranks(stated), _ranks(ours))
    return RankAgreement(len(rated), len(pairs), alike, ranked, _correlation(stated, ours))


def pooled_deviation(runs: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """The standard deviation of a run over seeds, from all networks with several, and its degrees of freedom."""
    several = [values for values in runs if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return None, 0
    return math.sqrt(sum((len(values) - 1) * variance(values) for values in several) / freedom), freedom


def t95(freedom: float) -> float:
    """The half-width of a two-sided 95% interval, in standard errors (Student's t)."""
    return float(_special().stdtrit(freedom, 0.975))


def _special() -> Any:
    return require("scipy.special", extra="train", purpose="judging accuracies over several seeds")


def _gaps(measure: str, scores: Sequence[Scores]) -> list[Gap]:
    by_name = {score.network: score for score in scores}
    asked = [claim for claim in ACCURACY_CLAIMS if claim.asked_of(measure)]
    return [
        _gap(claim, by_name[claim.network], by_name[claim.base], scores)
        for claim in asked
        if claim.network in by_name and claim.base in by_name
    ]


def _gap(claim: AccuracyClaim, one: Scores, base: Scores, scores: Sequence[Scores]) -> Gap:
    """The uncorrected answer: `p` is what one claim alone would give."""
    ours = 100 * (mean(one.ours) - mean(base.ours))
    stated = None if None in (one.published, base.published) else 100 * (one.published - base.published)  # type: ignore[operator]
    error, freedom = standard_error(one, base, scores)
    p, verdict = (None, UNDECIDED) if error is None else _one_sided(claim.expected, ours, error, freedom)
    half_width = None if error is None else error * t95(freedom)
    names = (claim.text, one.network, base.network, claim.expected)
    return Gap(*names, stated, ours, error, half_width, one.macs / base.macs, p, verdict)


def standard_error(one: Scores, base: Scores, scores: Sequence[Scores]) -> tuple[float | None, float]:
    """The standard error of a gap in points, and its degrees of freedom.

    Each side's spread is pooled within its recipe. Networks of different recipes are compared as Welch does.
    """
    spreads = [pooled_deviation([s.ours for s in scores if s.recipe == side.recipe]) for side in (one, base)]
    (first, freedom), (second, other) = spreads
    if first is None or second is None:
        return None, 0
    parts = first**2 / len(one.ours), second**2 / len(base.ours)
    error = 100 * math.sqrt(sum(parts))
    if one.recipe == base.recipe or not error:
        return error, freedom
    return error, sum(parts) ** 2 / (parts[0] ** 2 / freedom + parts[1] ** 2 / other)


def _one_sided(expected: str, gap: float, error: float, freedom: float) -> tuple[float, str]:
    """The stronger of the two one-sided answers, with its p-value: inside the expected range, or outside."""
    least, most = EXPECTED[expected]
    above_least, below_most = _below(least, gap, error, freedom), _below(gap, most, error, freedom)
    holds = max(above_least, below_most)
    fails = min(1 - above_least, 1 - below_most)
    return (holds, HOLDS) if holds <= fails else (fails, FAILS)


def _below(low: float, high: float, error: float, freedom: float) -> float:
    """The p-value of "low lies below high", where their difference has this standard error."""
    if math.isinf(low) or math.isinf(high):
        return 0.0
    if not error:
        return float(low >= high)
    return float(_special().stdtr(freedom, (low - high) / error))


def _corrected(gaps: Sequence[Gap]) -> list[Gap]:
    """Holm's step-down correction: the k-th smallest of n p-values counts (n - k + 1)-fold."""
    tested = sorted((i for i, gap in enumerate(gaps) if gap.p is not None), key=lambda i: gaps[i].p or 0.0)
    found, worst = list(gaps), 0.0
    for place, i in enumerate(tested):
        worst = max(worst, min(1.0, (gaps[i].p or 0.0) * (len(tested) - place)))
        found[i] = replace(gaps[i], p=worst, verdict=gaps[i].verdict if worst <= ALPHA else UNDECIDED)
    return found


def _ranks(values: Sequence[float]) -> list[float]:
    """Places from 1 up; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [mean(place for place, other in enumerate(ordered, 1) if other == value) for value in values]


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return correlation(one, other)
