"""How sure a difference of two designs is: intervals that resample seeds and images, corrected for many questions.

A run is drawn from all runs that other seeds would give, and a test image from all images that could have been
taken. Both designs meet the same images, so images are resampled for both together, and seeds for each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

RESAMPLES = 20_000


@dataclass(frozen=True)
class Gap:
    """Ours less theirs in percentage points, its interval, and how often a resampled gap misses the margin."""

    points: float
    low: float
    high: float
    p: float


def compare(
    ours: Tensor, theirs: Tensor, *, margin: float, alpha: float, resamples: int = RESAMPLES, seed: int = 0
) -> Gap:
    """Answers [runs, images] of two designs; the interval leaves a share `alpha` outside, half on each side.

    `p` is for the claim that the gap is above `margin` points.
    """
    points = 100 * float(ours.double().mean() - theirs.double().mean())
    gaps = resampled_gaps(ours, theirs, resamples=resamples, seed=seed)
    low, high = torch.quantile(gaps, torch.tensor([alpha / 2, 1 - alpha / 2], dtype=gaps.dtype)).tolist()
    # One more than were drawn: the gap that was found is one of those that chance could give.
    p = (int((gaps <= margin).sum()) + 1) / (resamples + 1)
    return Gap(points, low, high, p)


def resampled_gaps(ours: Tensor, theirs: Tensor, *, resamples: int, seed: int) -> Tensor:
    """Gaps in points over resampled images and seeds.

    Resampling images changes the accuracies of all runs together. They are means over thousands of images, so they
    are drawn from the normal distribution that the bootstrap of a mean tends to, with its very covariance.
    """
    draw = torch.Generator().manual_seed(seed)
    answers = torch.cat([ours, theirs]).double()
    images = answers.shape[1]
    centred = answers - answers.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred @ centred.T / images**2)
    noise = torch.randn(resamples, len(answers), generator=draw, dtype=torch.float64)
    shares = answers.mean(1) + (noise * values.clamp(min=0).sqrt()) @ vectors.T
    one, other = shares.split([len(ours), len(theirs)], dim=1)
    return 100 * (_over_seeds(one, draw) - _over_seeds(other, draw))


def _over_seeds(shares: Tensor, draw: torch.Generator) -> Tensor:
    """Means [resamples] of accuracies [resamples, runs] over runs drawn with replacement.

    Of n runs the bootstrap shows (n - 1) / n of the variance: their deviations are stretched to make up for it.
    """
    runs = shares.shape[1]
    if runs > 1:
        centre = shares.mean(1, keepdim=True)
        shares = centre + (shares - centre) * math.sqrt(runs / (runs - 1))
    return shares.gather(1, torch.randint(0, runs, shares.shape, generator=draw)).mean(1)


def holm(p: Sequence[float]) -> list[float]:
    """Corrected p-values after Holm (1979): the chance of any false claim stays below the level of the test."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def seed_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The mean over seeds and its interval by Student's t, on these test images."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, mean, mean
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    reach = student_t((1 + level) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


def student_t(p: float, freedom: int) -> float:
    """The quantile of Student's t, exact for one and two degrees of freedom, else by Cornish and Fisher."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z, v = NormalDist().inv_cdf(p), freedom
    terms = (
        z,
        (z**3 + z) / 4 / v,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / v**4,
    )
    return sum(terms)
