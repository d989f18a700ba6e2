"""What the paper's text says of its networks, as data that the audit can check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """`network` compared with `base` in one quantity.

    kind: "less" (percent less than the base), "of" (percent of the base) or "points" (percentage points above it).
    stated: the number in the text; digits: how precisely the text gives it; at_least: the text says "over".
    """

    text: str
    network: str
    base: str
    quantity: str
    kind: str
    stated: float
    digits: int = 0
    at_least: bool = False

    def value(self, ours: float, base: float) -> float:
        """The claimed number, from the two networks' figures."""
        if self.kind == "points":
            return 100 * (ours - base)
        return 100 * (1 - ours / base) if self.kind == "less" else 100 * ours / base

    def holds(self, value: float) -> bool:
        """Does a value agree with the text, to the digits that it gives?"""
        return value > self.stated if self.at_least else abs(value - self.stated) <= 0.5 * 10**-self.digits


_GMP, _VGG = "vgg11-gmp", "vgg11"
_LR, _LR2X, _JOIN = "vgg11-gmp-lr", "vgg11-gmp-lr-2x", "vgg11-gmp-lr-join"
_WFULL, _LDE = "vgg11-gmp-lr-join-wfull", "vgg11-gmp-lr-lde"

CLAIMS = (
    Claim("gmp: over 75% fewer parameters than vgg11", _GMP, _VGG, "params", "less", 75, at_least=True),
    Claim("sf: 14% less compute than vgg11", "vgg11-gmp-sf", _VGG, "macs", "less", 14),
    Claim("lr-join: 49% less compute than vgg11", _JOIN, _VGG, "macs", "less", 49),
    Claim("lr-2x: 58% less compute than gmp", _LR2X, _GMP, "macs", "less", 58),
    Claim("wfull: 16% less compute than gmp", _WFULL, _GMP, "macs", "less", 16),
    Claim("wfull: 16% less compute than vgg11 (abstract)", _WFULL, _VGG, "macs", "less", 16),
    Claim("lr: a third of the compute of gmp", _LR, _GMP, "macs", "of", 100 / 3),
    Claim("lr-2x: 41% less compute than vgg11 (abstract)", _LR2X, _VGG, "macs", "less", 41),
    Claim("lr-2x: 24% of vgg11's parameters (abstract)", _LR2X, _VGG, "params", "of", 24),
    Claim("lde: 86% less compute than gmp", _LDE, _GMP, "macs", "less", 86),
    Claim("lde: 87% less compute than vgg11", _LDE, _VGG, "macs", "less", 87),
    Claim("googlenet-lr: 26% less compute", "googlenet-lr", "googlenet", "macs", "less", 26),
    Claim("googlenet-lr: 41% fewer parameters", "googlenet-lr", "googlenet", "params", "less", 41),
    Claim("nin-c3: 26% less compute", "nin-c3", "nin", "macs", "less", 26),
    Claim("nin-c3: 54% of the parameters", "nin-c3", "nin", "params", "of", 54),
    Claim("nin-c3-lr: 54% of the compute", "nin-c3-lr", "nin", "macs", "of", 54),
    Claim("nin-c3-lr: 45% of the parameters", "nin-c3-lr", "nin", "params", "of", 45),
    Claim("nin-c3-lr: 46% less compute (abstract)", "nin-c3-lr", "nin", "macs", "less", 46),
    Claim("nin-c3-lr: 55% fewer parameters (abstract)", "nin-c3-lr", "nin", "params", "less", 55),
    Claim("gmp: almost 3 points of top-5 over vgg11", _GMP, _VGG, "top5", "points", 3),
    Claim("sf: 0.8 points of top-5 below gmp", "vgg11-gmp-sf", _GMP, "top5", "points", -0.8, 1),
    Claim("lr: no loss of accuracy against gmp", _LR, _GMP, "top5", "points", 0, 1),
    Claim("wfull: 1 point of top-5 over gmp", _WFULL, _GMP, "top5", "points", 1),
    Claim("wfull: 1 point of top-5 over googlenet", _WFULL, "googlenet", "top5", "points", 1),
    Claim("lde: 1.2 points of top-5 below gmp", _LDE, _GMP, "top5", "points", -1.2, 1),
    Claim("lde: 2.5 points of top-5 over vgg11", _LDE, _VGG, "top5", "points", 2.5, 1),
    Claim("nin-c3-lr: 0.1 points below nin", "nin-c3-lr", "nin", "top1", "points", -0.1, 1),
)
