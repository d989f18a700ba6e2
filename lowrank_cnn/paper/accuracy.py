"""Published accuracies, and what the text says of them, held against runs of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean, stdev

from lowrank_cnn.paper.claims import Claim
from lowrank_cnn.paper.gaps import MARGIN, pooled_deviation, t95
from lowrank_cnn.paper.published import Published

REPRODUCED = "reproduced"
MISSED = "not reached by the runs here"
UNDECIDED = "undecided by the runs here"
UNTESTED = "not tested: needs training"

REACHED = 0.3
"""Percentage points that the mean of our runs may lie below a published accuracy that it reproduces."""

Accuracies = Mapping[tuple[str, str, str], tuple[float, ...]]
"""Accuracies of runs by the published recipe on the published images: by table, network and measure, as shares."""


def hold_figure(stated: float, runs: tuple[float, ...]) -> tuple[str, str, str]:
    """What runs gave for a published accuracy, the verdict, and how it came about."""
    if not runs:
        return "", UNTESTED, ""
    gap = round(100 * (mean(runs) - stated), 6)
    several = len(runs) > 1
    spread = f"mean of {len(runs)} runs, standard deviation {100 * stdev(runs):.2f}" if several else "one run"
    note = f"{gap:+.2f} points, {spread}; reproduced if at most {REACHED} below."
    return f"{100 * mean(runs):.2f}%", REPRODUCED if gap >= -REACHED else MISSED, note


def hold_claim(claim: Claim, network: Published, base: Published, accuracies: Accuracies) -> tuple[str, str, str]:
    """The gap between two trained networks: as claimed where its 95% interval over seeds holds what is stated.

    An interval wider than what the paper calls comparable would hold anything, and decides nothing.
    """
    one, other = (accuracies.get((row.table, row.network, claim.quantity), ()) for row in (network, base))
    if not (one and other):
        return "", UNTESTED, ""
    gap = claim.value(mean(one), mean(other))
    tables = {network.table, base.table}
    keys = (key for key in accuracies if key[0] in tables and key[2] == claim.quantity)
    deviation, freedom = pooled_deviation([accuracies[key] for key in keys])
    if deviation is None:
        return f"{gap:+.2f} points", UNDECIDED, " Here single runs: what a seed makes is not known."
    reach = 100 * t95(freedom) * deviation * math.sqrt(1 / len(one) + 1 / len(other))
    agrees = claim.holds(gap) or abs(gap - claim.stated) <= reach
    decided = REPRODUCED if agrees else MISSED
    note = f" Here ± {reach:.2f} to 95%, over {len(one)} and {len(other)} runs."
    return f"{gap:+.2f} points", decided if reach <= MARGIN or not agrees else UNDECIDED, note
