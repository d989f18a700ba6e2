"""How certain a difference of two designs is: intervals that resample seeds and images.

A run is drawn from all runs that other seeds would give, and a test image from all images that could have been
taken. Both designs are tested on the same images, so images are resampled for both together, and seeds for each by
itself. A few runs do not tell exactly how much runs differ. As in Student's t, that widens the interval: a 99%
interval is twice as wide with four runs of each design, a quarter wider with eight, and hardly wider with 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 100_000


@dataclass(frozen=True)
class PairedGap:
    """Ours less theirs in percentage points, its interval, and how often a resampled gap misses the margin."""

    points: float
    low: float
    high: float
    p: float


def compare(
    ours: Tensor, theirs: Tensor, *, margin: float, alpha: float, resamples: int = RESAMPLES, seed: int = 0
) -> PairedGap:
    """Answers [runs, images] of two designs; the interval leaves a share `alpha` outside, half on each side.

    `p` is for the claim that the gap is above `margin` points.
    """
    points = 100 * float(ours.double().mean() - theirs.double().mean())
    gaps = resampled_gaps(ours, theirs, resamples=resamples, seed=seed)
    low, high = torch.quantile(gaps, torch.tensor([alpha / 2, 1 - alpha / 2], dtype=gaps.dtype)).tolist()
    # One more than were drawn: the gap that was found is one of those that chance could give.
    p = (int((gaps <= margin).sum()) + 1) / (resamples + 1)
    return PairedGap(points, low, high, p)


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
    # The symmetric root: other roots depend on the signs of eigenvectors, which machines choose differently.
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    noise = torch.randn(resamples, len(answers), generator=draw, dtype=torch.float64)
    shares = answers.mean(1) + noise @ root
    one, other = shares.split([len(ours), len(theirs)], dim=1)
    return (100 * (_over_seeds(one, draw) - _over_seeds(other, draw))).clamp(-100, 100)


def _over_seeds(shares: Tensor, draw: torch.Generator) -> Tensor:
    """Means [resamples] of accuracies [resamples, runs] over runs drawn with replacement.

    Of n runs the bootstrap shows (n - 1) / n of the variance: deviations are stretched to make up for it. The
    variance that is estimated from n runs is itself uncertain, as chi-squared with n - 1 degrees of freedom is:
    each resample has its own, which turns the normal distribution of a mean into Student's t.
    """
    runs = shares.shape[1]
    centre = shares.mean(1)
    if runs == 1:
        return centre
    drawn = shares.gather(1, torch.randint(0, runs, shares.shape, generator=draw)).mean(1) - centre
    squares = torch.randn(len(shares), runs - 1, generator=draw, dtype=shares.dtype).square().sum(1)
    return centre + drawn * (runs / squares).sqrt()
