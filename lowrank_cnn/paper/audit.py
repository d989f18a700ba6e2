"""The audit: every published figure and claim beside what this code computes, with a verdict, nothing adjusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from statistics import correlation

import torch

from lowrank_cnn.method.counting import Count, count
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.paper.accuracy import REPRODUCED, Accuracies, hold_claim, hold_figure
from lowrank_cnn.paper.claims import CLAIMS, Claim
from lowrank_cnn.paper.published import Published, published, rows, timings
from lowrank_cnn.paper.rivals import build_rival

CONTRADICTED = "contradicted by the paper's own table"
UNREPRODUCIBLE = "not reproducible from what was published"

_NOTES = {
    (
        "vgg11-gmp-lr-2x",
        "macs",
    ): "Only conv5 is doubled; the appendix doubles every layer, which would give 9.95G.",
    ("vgg11-gmp-lr-join-wfull", "macs"): "conv5 has 1024 filters; the appendix's 512 would give 5.10G.",
    (
        "vgg11-gmp-lr-lde",
        "macs",
    ): "Built as the appendix reads; no regular variant tried gives the published figure.",
    (
        "nin-c3",
        "macs",
    ): "conv2's second layer has three taps; the text's two full 3x3 layers would give 192,859,850.",
    ("googlenet", "macs"): "With both auxiliary heads.",
    ("googlenet", "params"): "Without the auxiliary heads and without the final classifier.",
    ("googlenet-lr", "macs"): "The published parameters hold for this structure, the published MACs do not.",
}
_PLACES = "Published: a quarter of the ILSVRC count, classifier and all 1000 classes; stride 2 leaves those whole."
_PLACES_NOTES = {"vgg11-gmp-sf": "Published: a quarter of the ILSVRC count of sf with vgg11's head, not gmp's."}


@dataclass(frozen=True)
class Finding:
    """One published figure or claim, what this code makes of it, and the verdict."""

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


def audit(accuracies: Accuracies | None = None) -> list[Finding]:
    """Every row of the published tables, then every claim of the text, each with what this code computes.

    Published accuracies are held against ours; without any they are not tested.
    """
    ours = accuracies or {}
    figures = [finding for row in rows() for finding in _check_row(row, ours)]
    return figures + [_check_claim(claim, ours) for claim in CLAIMS] + list(_check_correlation())


def summary(findings: list[Finding]) -> dict[str, int]:
    """How many findings have each verdict."""
    return dict(Counter(finding.verdict for finding in findings))


def _check_row(row: Published, accuracies: Accuracies) -> Iterator[Finding]:
    ours = _count(row)
    for quantity in ("macs", "params"):
        stated, computed = getattr(row, quantity), getattr(ours, quantity)
        verdict = REPRODUCED if stated == computed else UNREPRODUCIBLE
        note = _note(row, quantity)
        yield Finding(row.table, row.network, quantity, f"{stated:,}", f"{computed:,}", verdict, note)
    for quantity in ("top1", "top5"):
        if (stated := getattr(row, quantity)) is not None:
            runs = accuracies.get((row.table, row.network, quantity), ())
            computed, verdict, note = hold_figure(stated, runs)
            yield Finding(row.table, row.network, quantity, f"{100 * stated:.2f}%", computed, verdict, note)


def _note(row: Published, quantity: str) -> str:
    if row.table == "vgg-places":
        return _PLACES_NOTES.get(row.network, _PLACES) if quantity == "macs" else ""
    return _NOTES.get((row.network, quantity), "")


@cache
def _count(row: Published) -> Count:
    """Count the network that a row names, at the row's input, stride and number of classes, in the paper's way."""
    with torch.device("meta"):
        if row.network.startswith("googlenet-1"):  # ten and 144 crops of the same network, counted once
            return _googlenet_with_everything()
        if row.network not in list_models() or row.table.startswith("big-picture"):
            model, size = build_rival(row.network)
            return count(model, size, convention="paper")
        places = row.table == "vgg-places"
        model = create_model(row.network, stride=row.stride, num_classes=205 if places else None)
    return count(model, (3, row.input or 224, row.input or 224), convention="paper")


def _googlenet_with_everything() -> Count:
    """GoogLeNet as the big-picture table counts it: all parameters, the heads' and the classifier's too."""
    model = create_model("googlenet")
    model.unpublished = ()  # type: ignore[misc]  # this instance alone
    return count(model, model.input_size, convention="paper")


def _check_claim(claim: Claim, accuracies: Accuracies) -> Finding:
    table = published()
    ours, base = table[claim.network], table[claim.base]
    in_table = claim.value(getattr(ours, claim.quantity), getattr(base, claim.quantity))
    unit = " points" if claim.kind == "points" else "%"
    stated = f"{'>' if claim.at_least else ''}{claim.stated:.{claim.digits}f}{unit}"
    if claim.quantity.startswith("top"):
        computed, verdict, note = hold_claim(claim, ours, base, accuracies)
        verdict = verdict if claim.holds(in_table) else CONTRADICTED
        note = f"The paper's table gives {in_table:+.2f} points.{note}"
        return Finding("text", claim.text, "claim", stated, computed, verdict, note)
    value = claim.value(getattr(_count(ours), claim.quantity), getattr(_count(base), claim.quantity))
    missed = UNREPRODUCIBLE if claim.holds(in_table) else CONTRADICTED
    verdict = REPRODUCED if claim.holds(value) else missed
    note = "" if verdict == REPRODUCED else f"The table says {in_table:.1f}{unit}."
    return Finding("text", claim.text, "claim", stated, f"{value:.1f}{unit}", verdict, note)


def _check_correlation() -> Iterator[Finding]:
    """The claim that MACs and time go together, on the paper's own timings: Pearson's r over the layers."""
    layers = timings()
    macs = [float(layer.macs) for layer in layers]
    for device, times in (("CPU", [t.cpu_ms for t in layers]), ("GPU", [t.gpu_ms for t in layers])):
        r, without_first = correlation(macs, times), correlation(macs[2:], times[2:])
        verdict = REPRODUCED if r > 0.7 else CONTRADICTED
        note = f"Pearson's r over the {len(layers)} published layer timings; {without_first:.2f} without conv1."
        yield Finding(
            "text", f"MACs correlate strongly with {device} time", "claim", "strong", f"r = {r:.2f}", verdict, note
        )
