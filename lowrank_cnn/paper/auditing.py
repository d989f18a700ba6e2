"""The audit: every published figure and claim beside what this code computes, with a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import correlation, mean, stdev

import torch
from torch import nn

from lowrank_cnn.method.building import build_conv
from lowrank_cnn.method.counting import count
from lowrank_cnn.models import create_model
from lowrank_cnn.paper.claims import (
    ACCURACY_CLAIMS,
    COMPARABLE,
    COST_CLAIMS,
    EXPECTED,
    FAILS,
    HOLDS,
    AccuracyClaim,
    ClaimAnswer,
    CostClaim,
    Scores,
    answer_claims,
)
from lowrank_cnn.paper.counted import PADDED, count_padded_googlenet, count_row
from lowrank_cnn.paper.published import Published, published, rows, timings
from lowrank_cnn.system.text import counted

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted by the paper's own figures"
UNREPRODUCIBLE = "not reproducible from what was published"
MISSED = "not reached by the runs here"
UNDECIDED = "undecided by the runs here"
UNTESTED = "not tested: needs training or timing"
VERDICTS = (CONTRADICTED, UNREPRODUCIBLE, MISSED, UNDECIDED, UNTESTED, REPRODUCED)
"""Disagreements first."""

REACHED = 0.3
"""Percentage points by which the mean of our runs may miss a published accuracy and still reproduce it."""
STRONG = 0.7
"""Pearson's r from which a correlation counts as strong."""

ALMOST_TEN = 8.0
"""The factor from which "almost an order of magnitude" holds."""

Accuracies = Mapping[tuple[str, str, str], tuple[float, ...]]
"""Shares by published table, network and measure, one value per seed; the table's recipe trained them."""

_NOTES = {
    ("vgg11-gmp-lr-2x", "macs"): "Only conv5 is doubled; the appendix doubles every layer, which gives 9.95G.",
    ("vgg11-gmp-lr-join-wfull", "macs"): "conv5 has 1024 filters; the appendix's 512 give 5.10G.",
    ("vgg11-gmp-lr-lde", "macs"): "Built as the appendix describes; no variant tried gives the published figure.",
    ("nin-c3", "macs"): "conv2's second layer has three taps; the text's two full 3x3 layers give 192,859,850.",
    ("googlenet", "macs"): "With both auxiliary heads, without padding at the max-pools.",
    ("googlenet", "params"): "Without the auxiliary heads and without the final classifier.",
    **{(name, "macs"): "With the stride-2 max-pools padded by 1; the dense baseline was not." for name in PADDED},
}
_PLACES = "Published: a quarter of the ILSVRC count, classifier and 1000 classes included; stride 2 keeps those."
_PLACES_NOTES = {"vgg11-gmp-sf": "Published: a quarter of the ILSVRC count of sf with vgg11's head, not gmp's."}


@dataclass(frozen=True)
class Finding:
    """One published figure or claim, what this code computes for it, and the verdict."""

    table: str
    subject: str
    quantity: str
    published: str
    computed: str
    verdict: str
    note: str = ""

    def to_dict(self) -> dict[str, str]:
        """In values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class LayerTimes:
    """Measured times of one network's layers on one kind of device, beside their MACs."""

    network: str
    device: str
    macs: tuple[float, ...]
    ms: tuple[float, ...]


def audit(accuracies: Accuracies | None = None, measured: Sequence[LayerTimes] = ()) -> list[Finding]:
    """Check every row of the published tables, then every claim of the text.

    Accuracies of our runs and measured layer times decide the claims that need them; without any, those are
    marked as not tested.

    Example:
        >>> next(finding.subject for finding in audit() if finding.verdict == UNREPRODUCIBLE)
        'vgg11-gmp-lr-lde'
    """
    ours = accuracies or {}
    figures = [finding for row in rows() for finding in _check_row(row, ours)]
    text = [*map(_check_cost, COST_CLAIMS), _check_like_for_like(), *_check_accuracies(ours)]
    return [*figures, *text, _check_smallest(), _check_separable_rank(), *_check_correlation(measured)]


def summary(findings: Sequence[Finding]) -> dict[str, int]:
    """How many findings have each verdict, disagreements first."""
    counts = Counter(finding.verdict for finding in findings)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def _check_row(row: Published, accuracies: Accuracies) -> Iterator[Finding]:
    ours = count_row(row)
    for quantity in ("macs", "params"):
        stated, computed = getattr(row, quantity), getattr(ours, quantity)
        verdict = REPRODUCED if stated == computed else UNREPRODUCIBLE
        note = _note(row, quantity)
        yield Finding(row.table, row.network, quantity, f"{stated:,}", f"{computed:,}", verdict, note)
    for quantity in ("top1", "top5"):
        if (stated := getattr(row, quantity)) is not None:
            computed, verdict, note = _check_figure(stated, accuracies.get((row.table, row.network, quantity), ()))
            yield Finding(row.table, row.network, quantity, f"{100 * stated:.2f}%", computed, verdict, note)


def _note(row: Published, quantity: str) -> str:
    if row.crops > 1 and quantity == "macs":
        return f"Printed for one crop; the accuracy takes {row.crops}, which cost {row.macs_per_image:,}."
    if row.table == "vgg-places":
        return _PLACES_NOTES.get(row.network, _PLACES) if quantity == "macs" else ""
    return _NOTES.get((row.network, quantity), "")


def _check_figure(stated: float, runs: tuple[float, ...]) -> tuple[str, str, str]:
    """What our runs give for a published accuracy, the verdict, and how it was reached."""
    if not runs:
        return "", UNTESTED, ""
    gap = round(100 * (mean(runs) - stated), 6)
    several = len(runs) > 1
    spread = (
        f"mean of {counted(len(runs), 'seed')}, standard deviation {100 * stdev(runs):.2f}"
        if several
        else "one seed"
    )
    note = f"{gap:+.2f} points, {spread}; reproduced if at most {REACHED} below."
    return f"{100 * mean(runs):.2f}%", REPRODUCED if gap >= -REACHED else MISSED, note


def _check_cost(claim: CostClaim) -> Finding:
    ours, base = (published()[name] for name in (claim.network, claim.base))
    in_table = claim.value(getattr(ours, claim.quantity), getattr(base, claim.quantity))
    value = claim.value(getattr(count_row(ours), claim.quantity), getattr(count_row(base), claim.quantity))
    missed = UNREPRODUCIBLE if claim.holds(in_table) else CONTRADICTED
    verdict = REPRODUCED if claim.holds(value) else missed
    note = "" if verdict == REPRODUCED else f"The table says {in_table:.1f}%."
    stated = f"{'>' if claim.at_least else ''}{claim.stated:.0f}%"
    return Finding("text", claim.text, "claim", stated, f"{value:.1f}%", verdict, note)


def _check_like_for_like() -> Finding:
    """The paper compares a padded low-rank GoogLeNet with an unpadded dense one: treat both alike."""
    claim = next(c for c in COST_CLAIMS if c.network == "googlenet-lr" and c.quantity == "macs")
    padded = claim.value(*(count_padded_googlenet(name).macs for name in (claim.network, claim.base)))
    with torch.device("meta"):
        plain = [create_model(name) for name in (claim.network, claim.base)]
    unpadded = claim.value(*(count(net, net.input_size, convention="paper").macs for net in plain))
    verdict = REPRODUCED if claim.holds(padded) or claim.holds(unpadded) else CONTRADICTED
    note = f"The published figures compare a padded network with an unpadded one. Both padded: {padded:.1f}%."
    text = "googlenet-lr: compute saved, like for like"
    return Finding("text", text, "claim", f"{claim.stated:.0f}%", f"{unpadded:.1f}%", verdict, note)


def _check_accuracies(accuracies: Accuracies) -> Iterator[Finding]:
    """Every accuracy claim, in the measure that the text uses, against the paper's table and our runs."""
    answers = answer_claims(_scores(accuracies))
    for claim in ACCURACY_CLAIMS:
        found = next((gap for gap in answers.get(claim.measure, []) if gap.question == claim.text), None)
        yield _check_accuracy(claim, found)


def _scores(accuracies: Accuracies) -> dict[str, list[Scores]]:
    found: dict[str, list[Scores]] = {}
    for (table, network, measure), values in accuracies.items():
        row = published().get(network)
        if row is not None and row.table == table:
            stated = getattr(row, measure, None)
            found.setdefault(measure, []).append(Scores(network, stated, values, row.macs, recipe=table))
    return found


def _check_accuracy(claim: AccuracyClaim, gap: ClaimAnswer | None) -> Finding:
    computed, verdict, note = "", UNTESTED, ""
    if gap is not None:
        reach = "" if gap.half_width is None else f" ± {gap.half_width:.2f}"
        computed = f"{gap.ours:+.2f}{reach} points"
        verdict = {HOLDS: REPRODUCED, FAILS: MISSED}.get(gap.verdict, UNDECIDED)
        several = "" if gap.p is None else f"; p = {gap.p:.2g}, corrected for all claims tested"
        note = (
            f"95% interval over seeds{several}." if gap.half_width is not None else "Single seeds decide nothing."
        )
    stated = claim.expected if claim.stated is None else f"{claim.stated:+.{claim.digits}f} points"
    if claim.measure != "overfit":
        ours, base = (getattr(published()[name], claim.measure) for name in (claim.network, claim.base))
        in_table = 100 * (ours - base)
        note = f"The paper's table gives {in_table:+.2f} points. {note}".strip()
        if not _agrees(claim, in_table):
            verdict = CONTRADICTED
    return Finding("text", claim.text, "claim", stated, computed, verdict, note)


def _agrees(claim: AccuracyClaim, in_table: float) -> bool:
    """Whether the paper's table says what its text says, to the digits that the text gives."""
    if claim.stated is not None:
        return abs(in_table - claim.stated) <= 0.5 * 10**-claim.digits
    least, most = EXPECTED[claim.expected]
    return least <= in_table <= most


def _check_smallest() -> Finding:
    """The caption: googlenet-lr is almost ten times smaller than any other network of comparable accuracy."""
    ours = published()["googlenet-lr"]
    others = [row for row in rows() if row.dataset == ours.dataset and not row.network.startswith(ours.network)]
    near = [r for r in others if r.top5 is not None and abs(r.top5 - (ours.top5 or 0)) <= COMPARABLE / 100]
    nearest = min(near, key=lambda row: row.params)
    factor = nearest.params / ours.params
    note = f"{nearest.network} has {nearest.params:,} parameters and {100 * (nearest.top5 or 0):.2f}% top-5."
    text = "googlenet-lr: almost 10 times smaller than any comparable network"
    verdict = REPRODUCED if factor >= ALMOST_TEN else CONTRADICTED
    return Finding("text", text, "claim", "x 10", f"x {factor:.1f}", verdict, note)


def _check_separable_rank() -> Finding:
    """The text calls sf a rank-1 model; each of its 3x3 kernels sums one rank-1 product per channel between."""
    first, second = (m.weight for m in build_conv(64, 64, 3, "separable").modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        kernels = torch.einsum("dmxy,mcyw->dcxw", second.double(), first.double())
    rank = int(torch.linalg.matrix_rank(kernels[0, 0]))
    note = "Only the kernel between one input and one intermediate channel has rank 1."
    verdict = REPRODUCED if rank == 1 else CONTRADICTED
    return Finding("text", "sf: separable (rank-1) filters", "claim", "rank 1", f"rank {rank}", verdict, note)


def _check_correlation(measured: Sequence[LayerTimes]) -> Iterator[Finding]:
    """The claim that MACs and time correlate strongly over layers: on the paper's timings, and on ours."""
    layers = timings()
    macs = [float(layer.macs) for layer in layers]
    for device, times in (("CPU", [t.cpu_ms for t in layers]), ("GPU", [t.gpu_ms for t in layers])):
        r, without_first = correlation(macs, times), correlation(macs[2:], times[2:])
        note = f"The paper's own {len(layers)} layer timings; {without_first:.2f} without conv1."
        text = f"MACs correlate strongly with {device} time (the paper's timings)"
        yield Finding(
            "text", text, "claim", "strong", f"r = {r:.2f}", REPRODUCED if r > STRONG else CONTRADICTED, note
        )
        yield _check_measured(device, [times for times in measured if times.device == device])


def _check_measured(device: str, measured: Sequence[LayerTimes]) -> Finding:
    """The same claim on the timings of the records; every network has to show it."""
    text = f"MACs correlate strongly with {device} time (measured here)"
    by_network = {
        times.network: correlation(times.macs, times.ms) for times in measured if len(set(times.macs)) > 2
    }
    if not by_network:
        return Finding("text", text, "claim", "strong", "", UNTESTED, "")
    lowest, highest = min(by_network.values()), max(by_network.values())
    note = "; ".join(f"{network} {r:.2f}" for network, r in by_network.items())
    shown = f"r = {lowest:.2f}" if lowest == highest else f"r = {lowest:.2f} to {highest:.2f}"
    return Finding("text", text, "claim", "strong", shown, REPRODUCED if lowest > STRONG else MISSED, note)
