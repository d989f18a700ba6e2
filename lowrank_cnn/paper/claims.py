"""The claims of the paper's text as data, and the verdicts of runs on claims about accuracy.

Absolute accuracies on another data set cannot be compared with the published ones; differences can. The standard
error of a gap comes from the spread over seeds. Two or three seeds of one network say little about that spread, so
it is pooled over all networks trained by the same recipe, never across recipes. All networks use the same test
images; the error does not include the variation between sets of test images. Verdicts on several claims about the
same runs are corrected for their number (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from lowrank_cnn.core.numbers import holm, pearson, pooled_deviation, student_p, student_t

COMPARABLE = 1.0
"""Percentage points within which the paper calls two accuracies comparable."""
SMALL_LOSS = 2.0
"""Percentage points up to which the paper speaks of a small loss: its largest is 1.81."""
EXPECTED = {
    "above": (0.0, math.inf),
    "below": (-SMALL_LOSS, 0.0),
    "match": (-COMPARABLE, math.inf),
    "equal": (-COMPARABLE, COMPARABLE),
    "less": (-math.inf, 0.0),
}
"""The range of gaps, in percentage points, that each kind of claim allows."""


@dataclass(frozen=True)
class CostClaim:
    """The cost of `network` compared with `base`.

    kind: "less" (percent less than the base) or "of" (percent of the base).
    stated: the number in the text; at_least: the text says "over".
    """

    text: str
    network: str
    base: str
    quantity: str
    kind: str
    stated: float
    at_least: bool = False

    def value(self, ours: float, base: float) -> float:
        return 100 * (1 - ours / base) if self.kind == "less" else 100 * ours / base

    def holds(self, value: float) -> bool:
        """Whether a value agrees with the text, which rounds to whole percents."""
        return value > self.stated if self.at_least else abs(value - self.stated) <= 0.5


@dataclass(frozen=True)
class AccuracyClaim:
    """The accuracy of `network` compared with `base`; `expected` is a key of `EXPECTED`.

    stated: the gap in percentage points that the text gives for `measure`, to `digits` digits; None without one.
    The measure "overfit" is accuracy on training images minus accuracy on test images.
    """

    text: str
    network: str
    base: str
    expected: str
    stated: float | None = None
    digits: int = 0
    measure: str = "top5"

    def holds(self, gap: float) -> bool:
        """Whether a gap agrees with the text, to the digits that the text gives."""
        if self.stated is not None:
            return abs(gap - self.stated) <= 0.5 * 10**-self.digits
        least, most = EXPECTED[self.expected]
        return least <= gap <= most


_GMP, _VGG = "vgg11-gmp", "vgg11"
_LR, _LR2X, _JOIN = "vgg11-gmp-lr", "vgg11-gmp-lr-2x", "vgg11-gmp-lr-join"
_SF, _WFULL, _LDE = "vgg11-gmp-sf", "vgg11-gmp-lr-join-wfull", "vgg11-gmp-lr-lde"

COST_CLAIMS = (
    CostClaim("gmp: over 75% fewer parameters than vgg11", _GMP, _VGG, "params", "less", 75, at_least=True),
    CostClaim("sf: 14% less compute than vgg11", _SF, _VGG, "macs", "less", 14),
    CostClaim("lr-join: 49% less compute than vgg11", _JOIN, _VGG, "macs", "less", 49),
    CostClaim("lr-2x: 58% less compute than gmp", _LR2X, _GMP, "macs", "less", 58),
    CostClaim("wfull: 16% less compute than gmp", _WFULL, _GMP, "macs", "less", 16),
    CostClaim("wfull: 16% less compute than vgg11 (abstract)", _WFULL, _VGG, "macs", "less", 16),
    CostClaim("lr: a third of the compute of gmp", _LR, _GMP, "macs", "of", 100 / 3),
    CostClaim("lr-2x: 41% less compute than vgg11 (abstract)", _LR2X, _VGG, "macs", "less", 41),
    CostClaim("lr-2x: 24% of vgg11's parameters (abstract)", _LR2X, _VGG, "params", "of", 24),
    CostClaim("lde: 86% less compute than gmp", _LDE, _GMP, "macs", "less", 86),
    CostClaim("lde: 87% less compute than vgg11", _LDE, _VGG, "macs", "less", 87),
    CostClaim("googlenet-lr: 26% less compute", "googlenet-lr", "googlenet", "macs", "less", 26),
    CostClaim("googlenet-lr: 41% fewer parameters", "googlenet-lr", "googlenet", "params", "less", 41),
    CostClaim("nin-c3: 26% less compute", "nin-c3", "nin", "macs", "less", 26),
    CostClaim("nin-c3: 54% of the parameters", "nin-c3", "nin", "params", "of", 54),
    CostClaim("nin-c3-lr: 54% of the compute", "nin-c3-lr", "nin", "macs", "of", 54),
    CostClaim("nin-c3-lr: 45% of the parameters", "nin-c3-lr", "nin", "params", "of", 45),
    CostClaim("nin-c3-lr: 46% less compute (abstract)", "nin-c3-lr", "nin", "macs", "less", 46),
    CostClaim("nin-c3-lr: 55% fewer parameters (abstract)", "nin-c3-lr", "nin", "params", "less", 55),
)

ACCURACY_CLAIMS = (
    AccuracyClaim("gmp beats vgg11", _GMP, _VGG, "above", 3),
    AccuracyClaim("sf loses a little against gmp", _SF, _GMP, "below", -0.8, 1),
    AccuracyClaim("lr-join matches gmp", _JOIN, _GMP, "match"),
    AccuracyClaim("lr matches gmp", _LR, _GMP, "match", 0, 1),
    AccuracyClaim("lr equals lr-join: the join may be unnecessary", _LR, _JOIN, "equal", 0, 1),
    AccuracyClaim("lr-2x beats lr", _LR2X, _LR, "above"),
    AccuracyClaim("lr-2x beats gmp", _LR2X, _GMP, "above"),
    AccuracyClaim("wfull beats gmp", _WFULL, _GMP, "above", 1),
    AccuracyClaim("wfull beats lr-join", _WFULL, _JOIN, "above"),
    AccuracyClaim("wfull beats googlenet", _WFULL, "googlenet", "above", 1),
    AccuracyClaim("lde loses a little against gmp", _LDE, _GMP, "below", -1.2, 1),
    AccuracyClaim("lde beats vgg11", _LDE, _VGG, "above", 2.5, 1),
    AccuracyClaim("googlenet-lr matches googlenet", "googlenet-lr", "googlenet", "match"),
    AccuracyClaim("nin-c3 is no less accurate than nin", "nin-c3", "nin", "match", measure="top1"),
    AccuracyClaim("nin-c3-lr matches nin", "nin-c3-lr", "nin", "match", -0.1, 1, measure="top1"),
    AccuracyClaim("lr over-fits less than gmp", _LR, _GMP, "less", measure="overfit"),
    AccuracyClaim("nin-c3-lr over-fits less than nin", "nin-c3-lr", "nin", "less", measure="overfit"),
)

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
class ClaimAnswer:
    """The answer to one claim. Gaps, the standard error and the 95% half-width are percentage points.

    `error` and `half_width` are None for single seeds. `p` is the smaller of the one-sided p-values of "holds" and
    "does not hold", after correction. `mac_ratio` is the cost of the network here, divided by that of its base.
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


@dataclass(frozen=True)
class RankAgreement:
    """How far the order of n networks agrees with the published order: pairs in that order, and correlations."""

    n: int
    pairs: int
    alike: int
    rank_correlation: float | None
    linear_correlation: float | None


def answer_claims(scores: Mapping[str, Sequence[Scores]]) -> dict[str, list[ClaimAnswer]]:
    """The gaps by measure for all claims whose two networks were trained; verdicts are corrected together."""
    found: list[tuple[str, ClaimAnswer]] = []
    for measure, rows in scores.items():
        known = {score.network: score for score in rows}
        for claim in ACCURACY_CLAIMS:
            asked = (measure == "overfit") == (claim.measure == "overfit")
            if asked and claim.network in known and claim.base in known:
                found.append((measure, _gap(claim, known[claim.network], known[claim.base], rows)))
    corrected = iter(holm([gap.p for _, gap in found if gap.p is not None]))
    answers: dict[str, list[ClaimAnswer]] = {measure: [] for measure in scores}
    for measure, gap in found:
        if gap.p is not None:
            p = next(corrected)
            gap = replace(gap, p=p, verdict=gap.verdict if p <= ALPHA else UNDECIDED)
        answers[measure].append(gap)
    return answers


def rank_agreement(scores: Sequence[Scores]) -> RankAgreement:
    rated = [(score.published, fmean(score.ours)) for score in scores if score.published is not None]
    stated, ours = [published for published, _ in rated], [our for _, our in rated]
    pairs = [(a, b) for a, b in combinations(range(len(rated)), 2) if stated[a] != stated[b]]
    alike = sum((stated[a] > stated[b]) == (ours[a] > ours[b]) and ours[a] != ours[b] for a, b in pairs)
    several = len(rated) > 2
    ranked = pearson(_ranks(stated), _ranks(ours)) if several else None
    return RankAgreement(len(rated), len(pairs), alike, ranked, pearson(stated, ours) if several else None)


def _gap(claim: AccuracyClaim, one: Scores, base: Scores, scores: Sequence[Scores]) -> ClaimAnswer:
    """The uncorrected answer: `p` is that of one claim alone."""
    ours = 100 * (fmean(one.ours) - fmean(base.ours))
    stated = None
    if one.published is not None and base.published is not None:
        stated = 100 * (one.published - base.published)
    error, freedom = standard_error(one, base, scores)
    p, verdict, half_width = None, UNDECIDED, None
    if error is not None:
        p, verdict = _one_sided(claim.expected, ours, error, freedom)
        half_width = error * student_t(0.975, freedom)
    names = (claim.text, one.network, base.network, claim.expected)
    return ClaimAnswer(*names, stated, ours, error, half_width, one.macs / base.macs, p, verdict)


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
    ends = (least - gap, gap - most)  # both below zero inside
    outside = [student_p(end / error, freedom) if error else float(end >= 0) for end in ends]
    holds, fails = max(outside), min(1 - p for p in outside)
    return (holds, HOLDS) if holds <= fails else (fails, FAILS)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 up; equal values share their mean rank."""
    ordered = sorted(values)
    return [fmean(place for place, other in enumerate(ordered, 1) if other == value) for value in values]
