"""What the paper's text claims about its networks, as data: costs, accuracies and over-fitting."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        """The claimed percentage, from the costs of both networks."""
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

    def asked_of(self, measure: str) -> bool:
        """Whether runs can answer the claim in this measure."""
        return (measure == "overfit") == (self.measure == "overfit")


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
    AccuracyClaim("nin-c3 matches nin", "nin-c3", "nin", "match", measure="top1"),
    AccuracyClaim("nin-c3-lr matches nin", "nin-c3-lr", "nin", "match", -0.1, 1, measure="top1"),
    AccuracyClaim("lr over-fits less than gmp", _LR, _GMP, "less", measure="overfit"),
    AccuracyClaim("nin-c3-lr over-fits less than nin", "nin-c3-lr", "nin", "less", measure="overfit"),
)
