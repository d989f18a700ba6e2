"""Schemes: how a dense convolution is replaced by composites.

A *scheme* says how a dense k_h x k_w convolution with d filters is replaced by one composite or by a chain of two
with no activation between (four for `cp`).

    >>> scheme = parse_scheme("mixture(kx1=3, 1xk=3, kxk=2, join)")
    >>> for composite in scheme.stages((3, 3), 64):
    ...     print(composite)
    3x1,24 + 1x3,24 + 3x3,16
    1x1,64
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lowrank_cnn.method.scheme_rules import LARGEST, NONE, SHAPE, SchemeFields, check_scheme
from lowrank_cnn.method.spec import Composite, FilterGroup, Pair
from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.system.text import counted


@dataclass(frozen=True)
class Scheme(SchemeFields):
    """How a dense convolution is replaced. Build one with `parse_scheme`.

    - `shapes`: the basis filters' shapes, in terms of the dense k_h x k_w ("kx1", "1xk", "kxk", "5x1"), each with
      its proportion. For `separable` they are the two halves, in order.
    - `m`: the number of basis filters, where something follows them: an integer, a share of d, or None for d.
    - `to`: the filters of the closing 1x1 join as a share of d; None where there is no join.
    - `inputs`: for `exact`, the input channels where these are fewer than the dense layer has.
    - `multiple`: for `learned`, what the number of filters of each shape is a multiple of.
    - `channel_groups`: each basis filter sees one of this many parts of the input channels. A join then mixes the
      parts; without one, the outputs of the parts are shuffled, so that the next layer mixes them.
    - `branches`: in training a 1x1 conv and the identity stand beside the basis filters, which take them up
      exactly afterwards: more to learn with, nothing more to run.

    >>> import lowrank_cnn as lr
    >>> scheme = lr.parse_scheme("lr-join")
    >>> print(*scheme.stages((3, 3), 64), sep=" -> ")
    3x1,32 + 1x3,32 -> 1x1,64
    """

    def __post_init__(self) -> None:
        check_scheme(self)
        if isinstance(self.m, float) and self.m == 1:  # one spelling of d, so that equal schemes compare equal
            object.__setattr__(self, "m", None)

    def __str__(self) -> str:
        default = SCHEMES[self.name]
        items = [] if self.shapes == default.shapes else [_shape_text(*item) for item in self.shapes]
        items += [f"m={self.m}"] if self.m is not None else []
        items += ["join"] if self.name == "mixture" and self.to is not None else []
        items += [f"to={self.to}"] if self.name == "embed" and self.to != default.to else []
        items += [f"in={self.inputs}"] if self.inputs is not None else []
        items += [f"multiple={self.multiple}"] if self.multiple != default.multiple else []
        items += [f"channel_groups={self.channel_groups}"] if self.channel_groups > 1 else []
        items += ["branches"] if self.branches else []
        return self.name + (f"({', '.join(items)})" if items else "")

    def to_dict(self) -> dict[str, object]:
        """A form for configuration files; `parse_scheme` reads it back."""
        shapes = {shape: str(proportion) for shape, proportion in self.shapes}
        exact = {"in": self.inputs} if self.inputs is not None else {}
        learned = {"multiple": self.multiple} if self.multiple is not None else {}
        grouped = {"channel_groups": self.channel_groups} if self.channel_groups > 1 else {}
        branched = {"branches": True} if self.branches else {}
        known: dict[str, object] = {"name": self.name, "shapes": shapes, "m": self.m, "to": self.to}
        return {**known, **exact, **learned, **grouped, **branched}

    def out_filters(self, filters: int) -> int:
        """The output channels of the replacement of a conv with `filters` filters."""
        if self.name == "exact" and self.shapes:
            return int(sum(count for _, count in self.shapes))
        return filters if self.to is None else _scaled(self.to, filters)

    def for_layer(self, in_channels: int, filters: int, channel_groups: int = 1) -> Scheme:
        """The scheme as a layer takes it: without channel groups where its channels do not divide into them.

        The first layer of a network, which sees three colours, is such a layer. So is a conv that has channel
        groups of its own.
        """
        parts = self.channel_groups
        whole = channel_groups > 1 or in_channels % parts or filters % parts or filters // parts < len(self.shapes)
        return replace(self, channel_groups=1) if parts > 1 and whole else self

    def stages(self, kernel: Pair, filters: int, *, channel_groups: int = 1) -> tuple[Composite, ...]:
        """The composites that replace a dense conv, in order, with nothing between them."""
        if not isinstance(filters, int) or filters < 1:
            raise LowRankError(f"a convolution has a positive number of filters, not {filters!r}.")
        if not isinstance(channel_groups, int) or channel_groups < 1:
            raise LowRankError(f"channel_groups is a positive number, not {channel_groups!r}.")
        if self.name == "dense":
            return (Composite((FilterGroup(*kernel, filters),)),)
        if self.name == "learned":
            raise LowRankError("shapes are learned in training: use learn_shapes, or `lowrank train --scheme`.")
        shapes = [(resolve_shape(shape, kernel), proportion) for shape, proportion in self.shapes]
        if self.name == "exact":
            own = [(kernel, Fraction(filters))]
            return (Composite(tuple(FilterGroup(*shape, int(count)) for shape, count in shapes or own)),)
        if self.name == "separable":
            (first, _), (second, _) = shapes
            m = _units(_scaled(self.m, filters), channel_groups)
            return Composite((FilterGroup(*first, m),)), Composite((FilterGroup(*second, filters),))
        if self.name == "cp":
            return self._cp_stages(kernel, filters, channel_groups)
        parts = channel_groups * self.channel_groups
        if self.to is None:
            return (_share_out(shapes, filters, parts),)
        basis = _share_out(shapes, _units(_scaled(self.m, filters), parts), parts)
        return basis, Composite((FilterGroup(1, 1, self.out_filters(filters)),))

    def _cp_stages(self, kernel: Pair, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        """A 1x1, an upright and a lying strip for each of its channels, and a 1x1."""
        if channel_groups > 1:
            raise LowRankError("the scheme cp takes convolutions without channel groups.")
        m = _scaled(self.m, filters)
        shapes = ((1, 1, m), (kernel[0], 1, m), (1, kernel[1], m), (1, 1, filters))
        return tuple(Composite((FilterGroup(*shape),)) for shape in shapes)


_HALVES = (("kx1", Fraction(1)), ("1xk", Fraction(1)))
_NUMBER = re.compile(r"[+-]?\d{0,20}(\.\d{0,20})?(e[+-]?\d{1,2})?|\d{1,20}/\d{1,20}", re.IGNORECASE)
"""Numbers that are safe to build: Python would spend minutes on 1e9999999."""
_LONGEST = 2000
"""Characters of a scheme's text."""

SCHEMES: dict[str, Scheme] = {}
"""Every scheme by name, with its defaults."""


SCHEMES |= {
    "dense": Scheme("dense"),
    "separable": Scheme("separable", tuple(reversed(_HALVES))),
    "lr": Scheme("lr", _HALVES),
    "lr-join": Scheme("lr-join", _HALVES, to=1.0),
    "mixture": Scheme("mixture", (*_HALVES, ("kxk", Fraction(1)))),
    "channel": Scheme("channel", (("kxk", Fraction(1)),), to=1.0),
    "cp": Scheme("cp"),
    "embed": Scheme("embed", _HALVES, to=0.5),
    "exact": Scheme("exact"),
    "learned": Scheme("learned", (*_HALVES, ("1x1", Fraction(1)), ("kxk", Fraction(1))), multiple=8),
}

_OPTIONS = {
    "dense": {"branches"},
    "separable": {"m"},
    "lr": {"channel_groups", "branches"},
    "lr-join": {"m", "channel_groups", "branches"},
    "channel": {"m"},
    "cp": {"m"},
    "mixture": {"m", "join", "channel_groups", "branches"},
    "embed": {"m", "to"},
}
_OPTIONS |= {"exact": {"in"}, "learned": {"multiple"}}


def parse_scheme(text: str | Mapping[str, object] | Scheme) -> Scheme:
    """Read a scheme from its short string or its dict: `lr`, `lr-join(m=0.5)`, `mixture(kx1=3, kxk, join)`.

    >>> import lowrank_cnn as lr
    >>> str(lr.parse_scheme("mixture(kx1=3, 1xk=3, kxk=2, join)"))
    'mixture(kx1=3, 1xk=3, kxk=2, join)'
    """
    if isinstance(text, Scheme):
        return text
    if isinstance(text, Mapping):
        return _from_dict(text)
    if not isinstance(text, str):
        raise LowRankError(f"a scheme is a string, a dict or a Scheme, not {text!r}.")
    if len(text) > _LONGEST:
        raise LowRankError(f"a scheme is a short text; this one has {len(text):,} characters.")
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise LowRankError(f"cannot read the scheme {text!r}; write name or name(option, option=value).")
    name, inside = match[1], match[2] or ""
    shapes: dict[str, object] = {}
    options: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in inside.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        target = shapes if SHAPE.fullmatch(key) or key == NONE else options
        if key in target:
            raise LowRankError(f"{key} is given twice in the scheme {text!r}.")
        target[key] = value or True
    return _build(name, shapes, options)


def _from_dict(fields: Mapping[str, object]) -> Scheme:
    known = dict(fields)
    name, shapes = str(known.pop("name", "")), known.pop("shapes", {})
    if not isinstance(shapes, Mapping):
        raise LowRankError(f"the shapes of a scheme map a shape to its proportion, not {shapes!r}.")
    options = {key: value for key, value in known.items() if value is not None}
    if options.get("to") == 1.0 and name in ("mixture", "lr-join", "channel"):  # their join, written out
        del options["to"]
        options |= {"join": True} if name == "mixture" else {}
    return _build(name, dict(shapes), options)


def _build(name: str, shapes: Mapping[str, object], options: Mapping[str, object]) -> Scheme:
    if name not in SCHEMES:
        raise LowRankError(f"there is no scheme {name!r}; {nearest(name, SCHEMES)}")
    allowed = _OPTIONS.get(name, set())
    if unknown := set(options) - allowed:
        shaped = "" if name == "dense" else " and shapes"
        takes = f"takes {', '.join(sorted(allowed))}{shaped}" if allowed else "takes shapes alone"
        raise LowRankError(f"the scheme {name} {takes}, not {', '.join(sorted(unknown))}.")
    if name == "dense" and shapes:
        raise LowRankError("the scheme dense takes no shapes: it leaves a convolution as it is.")
    default = SCHEMES[name]
    proportions = tuple((shape, _fraction(value)) for shape, value in shapes.items()) or default.shapes
    m = _amount(options["m"]) if "m" in options else default.m
    to = float(_fraction(options["to"])) if "to" in options else default.to
    to = 1.0 if _yes(options, "join") else to
    inputs, multiple, parts = (_whole(options, key) for key in ("in", "multiple", "channel_groups"))
    multiple = default.multiple if multiple is None else multiple
    branches = _yes(options, "branches")
    return Scheme(name, proportions, m, to, inputs, multiple, 1 if parts is None else parts, branches)


def _whole(options: Mapping[str, object], key: str) -> int | None:
    """A whole number among the options; None where it is not given."""
    number = _amount(options[key]) if key in options else None
    if isinstance(number, float):
        raise LowRankError(f"{key} in a scheme is a whole number, not {options[key]}.")
    return number


def _yes(options: Mapping[str, object], key: str) -> bool:
    """A bare `join` means True; `join=no` is possible too."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    value = options.get(key, False)
    if str(value).lower() not in words:
        raise LowRankError(f"{key} is yes or no, not {value!r}.")
    return words[str(value).lower()]


def _fraction(value: object) -> Fraction:
    """A bare shape, as in `mixture(kx1, kxk)`, has proportion one."""
    if value is True:
        return Fraction(1)
    try:
        text = str(value)
        number = Fraction(text) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        number, text = None, "this"
    if number is None or abs(number) > LARGEST:
        raise LowRankError(f"{text[:40]!r} in a scheme is not a number up to {LARGEST:,}.")
    return number


def _amount(value: object) -> int | float:
    """A plain integer is a number of filters (m=96), anything else a share of d (m=0.5)."""
    number = _fraction(value)
    return int(number) if re.fullmatch(r"-?\d+", str(value)) else float(number)


def _shape_text(shape: str, proportion: Fraction) -> str:
    return shape if proportion == 1 else f"{shape}={proportion}"


def resolve_shape(shape: str, kernel: Pair) -> Pair:
    """The height and width of a shape like kx1, for a dense kernel."""
    height, width = shape.split("x")
    return (kernel[0] if height == "k" else int(height)), (kernel[1] if width == "k" else int(width))


def _scaled(amount: int | float | None, filters: int) -> int:
    if amount is None:
        return filters
    return amount if isinstance(amount, int) else max(1, round(amount * filters))


def _units(filters: int, unit: int) -> int:
    """The nearest positive multiple of `unit`."""
    return max(1, round(filters / unit)) * unit


def _share_out(shapes: Sequence[tuple[Pair, Fraction]], filters: int, unit: int) -> Composite:
    """Share `filters` out by proportion, in multiples of `unit`, so that the total is kept.

    Each shape gets its whole part; what is left goes one by one to the largest remainders (first on a tie).
    """
    if filters % unit:
        raise LowRankError(f"{counted(filters, 'filter')} cannot be divided into {unit} channel groups.")
    whole, total = filters // unit, sum(proportion for _, proportion in shapes)
    exact = [whole * proportion / total for _, proportion in shapes]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: whole - sum(counts)]:
        counts[i] += 1
    groups = [FilterGroup(*shape, n * unit) for (shape, _), n in zip(shapes, counts, strict=True) if n]
    return Composite(tuple(groups))
