"""What a scheme may be: the names, the shapes, and the options that go together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lowrank_cnn.system.errors import LowRankError, nearest

NAMES = ("dense", "separable", "lr", "lr-join", "mixture", "channel", "cp", "embed", "exact", "learned")
NONE = "none"
"""The shape of a filter that `learned` may remove."""
SHAPE = re.compile(r"(k|[1-9]\d{0,4})x(k|[1-9]\d{0,4})")
LARGEST = 10**9

_JOINS: dict[str, tuple[float | None, ...]] = {
    "mixture": (None, 1.0),
    "lr-join": (1.0,),
    "channel": (1.0,),
    "embed": (),
}
"""What `to` may be: a mixture has a join or none, an embedding one to any share, the others none."""


@dataclass(frozen=True)
class SchemeFields:
    """What a scheme is made of; `Scheme` says what each field means."""

    name: str
    shapes: tuple[tuple[str, Fraction], ...] = ()
    m: int | float | None = None
    to: float | None = None
    inputs: int | None = None
    multiple: int | None = None
    channel_groups: int = 1
    branches: bool = False


def check_scheme(scheme: SchemeFields) -> None:
    """Raise `LowRankError` for a scheme that no layer can be built from."""
    if scheme.name not in NAMES:
        raise LowRankError(f"there is no scheme {scheme.name!r}; {nearest(str(scheme.name), NAMES)}")
    if scheme.name != "embed" and scheme.to not in _JOINS.get(scheme.name, (None,)):
        raise LowRankError(f"the scheme {scheme.name} cannot join to {scheme.to}; embed(to={scheme.to}) can.")
    for shape, proportion in scheme.shapes:
        if not SHAPE.fullmatch(shape) and not (scheme.name == "learned" and shape == NONE):
            raise LowRankError(f"a filter shape is written like kx1, 1xk, kxk or 5x1, not {shape!r}.")
        if not 0 < proportion <= LARGEST:
            raise LowRankError(f"the proportion of {shape} filters must be positive, not {proportion}.")
        if scheme.name == "exact" and proportion.denominator != 1:
            raise LowRankError(f"the scheme exact counts filters: {shape}={proportion} is no whole number.")
    numbers = {"m": scheme.m, "to": scheme.to, "in": scheme.inputs, "multiple": scheme.multiple}
    numbers |= {"channel_groups": scheme.channel_groups}
    for label, value in numbers.items():
        if value is not None and not 0 < value <= LARGEST:
            raise LowRankError(
                f"{label} in the scheme {scheme.name} must be positive and at most {LARGEST:,}, not {value:g}."
            )
    if scheme.branches and scheme.name not in ("dense", "lr", "lr-join", "mixture"):
        raise LowRankError(f"branches are for dense, lr, lr-join and mixture, not for {scheme.name}.")
    if scheme.branches and scheme.channel_groups > 1:
        raise LowRankError("branches see all channels: a scheme has either branches or channel_groups.")
    if scheme.name == "mixture" and scheme.to is None and scheme.m is not None:
        raise LowRankError("m basis filters need a join after them: write mixture(..., m=..., join).")
    if scheme.name == "channel" and scheme.shapes != (("kxk", Fraction(1)),):
        raise LowRankError("the scheme channel has filters of the layer's own kernel: it takes m alone.")
    if scheme.name == "cp" and scheme.shapes:
        raise LowRankError("the scheme cp has strips of the layer's own kernel: it takes m alone.")
    if scheme.name == "separable" and not _crossed([shape for shape, _ in scheme.shapes]):
        raise LowRankError("a separable scheme has two shapes, one upright and one lying: 1xk and kx1.")
    shapes = [shape for shape, _ in scheme.shapes if shape != NONE]
    if scheme.name in ("lr", "lr-join", "mixture", "embed", "learned") and not shapes:
        raise LowRankError(f"the scheme {scheme.name} needs shapes, like {scheme.name}(kx1, 1xk, kxk).")


def _crossed(shapes: Sequence[str]) -> bool:
    lying = [shape.startswith("1x") for shape in shapes]
    upright = [shape.endswith("x1") for shape in shapes]
    return len(shapes) == 2 and (lying, upright) in (
        ([True, False], [False, True]),
        ([False, True], [True, False]),
    )
