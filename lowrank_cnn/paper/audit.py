"""The audit: every published figure and claim, the value that this code computes, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import correlation, mean, stdev
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.errors import check_choice
from lowrank_cnn.core.notes import AsDict, note
from lowrank_cnn.core.text import counted
from lowrank_cnn.method.count import Count, count
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.paper import claims
from lowrank_cnn.paper.published import Published, published, rows, timings

# The rivals of the two "big picture" plots are tables from which their cost is counted: AlexNet (Krizhevsky et
# al. 2012), VGG A to E (Simonyan and Zisserman 2015) and the PReLU networks A to C (He et al. 2015, "Delving
# deep into rectifiers"). Only convs, pools and fully connected layers are built: nothing else has MACs.

PLACES_CLASSES = 205
PADDED = ("googlenet-lr", "googlenet-lr-conv1")
"""Networks whose published MACs include padding, while those of the dense baseline do not."""


@cache
def count_row(row: Published) -> Count:
    """Count the network that a row names, at the row's input, stride and number of classes, for one crop."""
    size = (3, row.input or 224, row.input or 224)
    with torch.device("meta"):
        if row.crops > 1:
            model = create_model("googlenet")
            note(model, unpublished=())  # this table counts the heads and the classifier too
            size = model.input_size
        elif row.network not in list_models() or row.table.startswith("big-picture"):
            model, size = build_rival(row.network)
        elif row.network in PADDED:
            return count_padded_googlenet(row.network)
        else:
            classes = PLACES_CLASSES if row.table == "vgg-places" else None
            model = create_model(row.network, stride=row.stride, num_classes=classes)
        return count(model, size, convention="paper")


@cache
def count_padded_googlenet(name: str) -> Count:
    """Count a GoogLeNet as the paper counted its low-rank ones.

    Padding by 1 at the four stride-2 max-pools gives feature maps of 57, 29, 15 and 8 pixels. The last pool stays
    7x7 with stride 1, which gives 2x2 feature maps, so the classifier reads 4,096 values. The auxiliary pools
    (5x5, stride 3) give 5x5 feature maps, so their first fully connected layer reads 3,200.
    """
    with torch.device("meta"):
        model: Any = create_model(name)
        for module in model.modules():
            if isinstance(module, nn.MaxPool2d) and module.stride == 2:
                module.padding = 1
        model.classifier.pool = nn.Sequential(nn.AvgPool2d(7, 1), nn.Flatten())
        model.classifier.fc = nn.Linear(4 * model.classifier.fc.in_features, model.classifier.fc.out_features)
        for head in (model.aux1, model.aux2):
            head.pool = nn.AvgPool2d(5, 3, ceil_mode=True)
            head.fc1 = nn.Linear(25 * head.fc1.in_features // 16, head.fc1.out_features)
        return count(model, model.input_size, convention="paper")


RivalRow = tuple[int, ...] | str
"""(kernel, filters), with stride, or with stride, padding and channel groups; "M2" or "M3": a max-pool."""


def _vgg(*depths: int, last: int = 3) -> list[RivalRow]:
    """A VGG by the depths of its stages; `last` is the kernel of the last layer of stages of more than two."""
    rows: list[RivalRow] = []
    for depth, filters in zip(depths, (64, 128, 256, 512, 512), strict=True):
        rows += [*[(3, filters)] * (depth - 1), (last if depth > 2 else 3, filters), "M2"]
    return rows


def _prelu(widths: tuple[int, int, int], depth: int) -> list[RivalRow]:
    rows: list[RivalRow] = [(7, 96, 2)]
    for width in widths:
        rows += ["M2", *[(3, width)] * depth]
    return rows


_ALEXNET: list[RivalRow] = [
    (11, 96, 4, 0, 1), "M3", (5, 256, 1, 2, 2), "M3", (3, 384), (3, 384, 1, 1, 2), (3, 256, 1, 1, 2), "M3",
]  # fmt: skip

GRIDS = 7 * 7 + 3 * 3 + 2 * 2 + 1
"""Values of each channel in the spatial pyramid of the PReLU networks (He et al. 2014)."""
RIVALS: dict[str, tuple[int, list[RivalRow], int]] = {  # image, rows, values of each channel that fc6 reads
    "alexnet": (227, _ALEXNET, 6 * 6),
    "vgg11": (224, _vgg(1, 1, 2, 2, 2), 7 * 7),
    "vgg13": (224, _vgg(2, 2, 2, 2, 2), 7 * 7),
    "vgg16-c": (224, _vgg(2, 2, 3, 3, 3, last=1), 7 * 7),
    "vgg16-d": (224, _vgg(2, 2, 3, 3, 3), 7 * 7),
    "vgg19": (224, _vgg(2, 2, 4, 4, 4), 7 * 7),
    "msra-a": (224, _prelu((256, 512, 512), 5), GRIDS),
    "msra-b": (224, _prelu((256, 512, 512), 6), GRIDS),
    "msra-c": (224, _prelu((384, 768, 896), 6), GRIDS),
}


def build_rival(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    check_choice("rival network", name, RIVALS)
    image, rows, values = RIVALS[name]
    channels, layers = 3, []
    for row in rows:
        if isinstance(row, str):
            layers.append(nn.MaxPool2d(int(row[1]), 2, ceil_mode=True))
            continue
        layers.append(_conv(channels, *row))
        channels = row[1]
    if values == GRIDS:
        layers.append(nn.AdaptiveMaxPool2d((GRIDS, 1)))  # one pool that gives as many values as all grids
    head = [nn.Linear(channels * values, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *head), (3, image, image)


def _conv(
    channels: int, kernel: int, filters: int, stride: int = 1, padding: int | None = None, groups: int = 1
) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, kernel, stride, kernel // 2 if padding is None else padding, groups=groups)


REPRODUCED = "reproduced"
CONTRADICTED = "contradicted by the paper's own figures"
UNREPRODUCIBLE = "not reproducible from what was published"
MISSED = "not reached by the runs here"
UNDECIDED = "undecided by the runs here"
UNTESTED = "not tested: needs training or timing"
VERDICTS = (CONTRADICTED, UNREPRODUCIBLE, MISSED, UNDECIDED, UNTESTED, REPRODUCED)
"""Disagreements first."""

REACHED = 0.3
"""Percentage points by which the mean of our runs may be below a published accuracy and still reproduce it."""
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
class Finding(AsDict):
    """One published figure or claim, what this code computes for it, and the verdict."""

    table: str
    subject: str
    quantity: str
    published: str
    computed: str
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class LayerTimes:
    """Measured times of one network's layers on one kind of device, with their MACs."""

    network: str
    device: str
    macs: tuple[float, ...]
    ms: tuple[float, ...]


def audit(accuracies: Accuracies | None = None, measured: Sequence[LayerTimes] = ()) -> list[Finding]:
    """Check every row of the published tables, then every claim of the text.

    Accuracies of our runs and measured layer times decide the claims that need them; without these, such claims
    are marked as not tested.

    Example:
        >>> next(finding.subject for finding in audit() if finding.verdict == UNREPRODUCIBLE)
        'vgg11-gmp-lr-lde'
    """
    ours = accuracies or {}
    figures = [finding for row in rows() for finding in _check_row(row, ours)]
    text = [*map(_check_cost, claims.COST_CLAIMS), _check_like_for_like(), *_check_accuracies(ours)]
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
            runs = accuracies.get((row.table, row.network, quantity), ())
            yield Finding(row.table, row.network, quantity, f"{100 * stated:.2f}%", *_check_figure(stated, runs))


def _note(row: Published, quantity: str) -> str:
    if row.crops > 1 and quantity == "macs":
        return f"Printed for one crop; the accuracy takes {row.crops}, which cost {row.macs_per_image:,}."
    if row.table == "vgg-places":
        return _PLACES_NOTES.get(row.network, _PLACES) if quantity == "macs" else ""
    return _NOTES.get((row.network, quantity), "")


def _check_figure(stated: float, runs: tuple[float, ...]) -> tuple[str, str, str]:
    """The accuracy of our runs against a published one, the verdict, and the reason."""
    if not runs:
        return "", UNTESTED, ""
    gap, spread = round(100 * (mean(runs) - stated), 6), "one seed"
    if len(runs) > 1:
        spread = f"mean of {counted(len(runs), 'seed')}, standard deviation {100 * stdev(runs):.2f}"
    note = f"{gap:+.2f} points, {spread}; reproduced if at most {REACHED} below."
    return f"{100 * mean(runs):.2f}%", REPRODUCED if gap >= -REACHED else MISSED, note


def _claim(text: str, published: str, computed: str, verdict: str, note: str = "") -> Finding:
    return Finding("text", text, "claim", published, computed, verdict, note)


def _check_cost(claim: claims.CostClaim) -> Finding:
    ours, base = (published()[name] for name in (claim.network, claim.base))
    in_table = claim.value(getattr(ours, claim.quantity), getattr(base, claim.quantity))
    value = claim.value(getattr(count_row(ours), claim.quantity), getattr(count_row(base), claim.quantity))
    missed = UNREPRODUCIBLE if claim.holds(in_table) else CONTRADICTED
    verdict = REPRODUCED if claim.holds(value) else missed
    note = "" if verdict == REPRODUCED else f"The table says {in_table:.1f}%."
    stated = f"{'>' if claim.at_least else ''}{claim.stated:.0f}%"
    return _claim(claim.text, stated, f"{value:.1f}%", verdict, note)


@cache
def _check_like_for_like() -> Finding:
    """The paper compares a padded low-rank GoogLeNet with an unpadded dense one: treat both alike."""
    claim = next(c for c in claims.COST_CLAIMS if c.network == "googlenet-lr" and c.quantity == "macs")
    padded = claim.value(*(count_padded_googlenet(name).macs for name in (claim.network, claim.base)))
    with torch.device("meta"):
        plain = [create_model(name) for name in (claim.network, claim.base)]
    unpadded = claim.value(*(count(net, net.input_size, convention="paper").macs for net in plain))
    verdict = REPRODUCED if claim.holds(padded) or claim.holds(unpadded) else CONTRADICTED
    note = f"The published figures compare a padded network with an unpadded one. Both padded: {padded:.1f}%."
    text = "googlenet-lr: compute saved, like for like"
    return _claim(text, f"{claim.stated:.0f}%", f"{unpadded:.1f}%", verdict, note)


def _check_accuracies(accuracies: Accuracies) -> Iterator[Finding]:
    """Every accuracy claim, in the measure that the text uses, against the paper's table and our runs."""
    scores: dict[str, list[claims.Scores]] = {}
    for (table, network, measure), values in accuracies.items():
        row = published().get(network)
        if row is not None and row.table == table:
            stated = getattr(row, measure, None)
            scores.setdefault(measure, []).append(claims.Scores(network, stated, values, row.macs, recipe=table))
    gaps = claims.answer_claims(scores)
    answers = {(measure, gap.question): gap for measure, found in gaps.items() for gap in found}
    for claim in claims.ACCURACY_CLAIMS:
        yield _check_accuracy(claim, answers.get((claim.measure, claim.text)))


def _check_accuracy(claim: claims.AccuracyClaim, gap: claims.ClaimAnswer | None) -> Finding:
    computed, verdict, note = "", UNTESTED, ""
    if gap is not None:
        computed, note = f"{gap.ours:+.2f} points", "Single seeds decide nothing."
        if gap.half_width is not None:
            computed = f"{gap.ours:+.2f} ± {gap.half_width:.2f} points"
            note = f"95% interval over seeds; p = {gap.p:.2g}, corrected for all claims tested."
        verdict = {claims.HOLDS: REPRODUCED, claims.FAILS: MISSED}.get(gap.verdict, UNDECIDED)
    stated = claim.expected if claim.stated is None else f"{claim.stated:+.{claim.digits}f} points"
    if claim.measure != "overfit":
        ours, base = (getattr(published()[name], claim.measure) for name in (claim.network, claim.base))
        in_table = 100 * (ours - base)
        note = f"The paper's table gives {in_table:+.2f} points. {note}".strip()
        verdict = verdict if claim.holds(in_table) else CONTRADICTED
    return _claim(claim.text, stated, computed, verdict, note)


def _check_smallest() -> Finding:
    """The caption: googlenet-lr is almost ten times smaller than any other network of comparable accuracy."""
    ours = published()["googlenet-lr"]
    others = [row for row in rows() if row.dataset == ours.dataset and not row.network.startswith(ours.network)]
    near = [r for r in others if r.top5 is not None and abs(r.top5 - (ours.top5 or 0)) <= claims.COMPARABLE / 100]
    nearest = min(near, key=lambda row: row.params)
    factor = nearest.params / ours.params
    note = f"{nearest.network} has {nearest.params:,} parameters and {100 * (nearest.top5 or 0):.2f}% top-5."
    text = "googlenet-lr: almost 10 times smaller than any comparable network"
    verdict = REPRODUCED if factor >= ALMOST_TEN else CONTRADICTED
    return _claim(text, "x 10", f"x {factor:.1f}", verdict, note)


def _check_separable_rank() -> Finding:
    """The text calls sf a rank-1 model; each of its 3x3 kernels sums one rank-1 product per channel between."""
    first, second = (m.weight for m in build_conv(64, 64, 3, "separable").modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        kernels = torch.einsum("dmxy,mcyw->dcxw", second.double(), first.double())
    rank = int(torch.linalg.matrix_rank(kernels[0, 0]))
    note = "Only the kernel between one input and one intermediate channel has rank 1."
    verdict = REPRODUCED if rank == 1 else CONTRADICTED
    return _claim("sf: separable (rank-1) filters", "rank 1", f"rank {rank}", verdict, note)


def _check_correlation(measured: Sequence[LayerTimes]) -> Iterator[Finding]:
    """The claim that MACs and time correlate strongly over layers: on the paper's timings, and on ours."""
    layers = timings()
    macs = [float(layer.macs) for layer in layers]
    for device, times in (("CPU", [t.cpu_ms for t in layers]), ("GPU", [t.gpu_ms for t in layers])):
        r, without_first = correlation(macs, times), correlation(macs[2:], times[2:])
        note = f"The paper's own {len(layers)} layer timings; {without_first:.2f} without conv1."
        text = f"MACs correlate strongly with {device} time (the paper's timings)"
        verdict = REPRODUCED if r > STRONG else CONTRADICTED
        yield _claim(text, "strong", f"r = {r:.2f}", verdict, note)
        yield _check_measured(device, [times for times in measured if times.device == device])


def _check_measured(device: str, measured: Sequence[LayerTimes]) -> Finding:
    """The same claim on our recorded timings; it must hold for every network."""
    text = f"MACs correlate strongly with {device} time (measured here)"
    by_network = {t.network: correlation(t.macs, t.ms) for t in measured if len(set(t.macs)) > 2}
    if not by_network:
        return _claim(text, "strong", "", UNTESTED)
    lowest, highest = min(by_network.values()), max(by_network.values())
    note = "; ".join(f"{network} {r:.2f}" for network, r in by_network.items())
    shown = f"r = {lowest:.2f}" if lowest == highest else f"r = {lowest:.2f} to {highest:.2f}"
    return _claim(text, "strong", shown, REPRODUCED if lowest > STRONG else MISSED, note)
