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

import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.notes import Fitted
from lowrank_cnn.core.text import counted
from lowrank_cnn.kernels.reference import compose, ungrouped
from lowrank_cnn.method.branches import BranchedConv2d, branched_conv
from lowrank_cnn.method.channel import (
    FactoredLayer,
    basis_filters,
    channel_macs,
    channel_rank,
    fit_factored,
    outputs_of,
)
from lowrank_cnn.method.factorize import (
    CPFactors,
    centred,
    cp_factors,
    crossed_factors,
    crossed_weight,
    kept_energy,
    separable_factors,
)
from lowrank_cnn.method.geometry import Padding, Sides, enclosing_padding, pair, recentred
from lowrank_cnn.method.layers import CompositeConv2d, conv_of, weights_of
from lowrank_cnn.method.spec import Composite, FilterGroup, Pair

# What a scheme may be: the names, the shapes, and the options that go together.

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


# `build_conv` builds the layer or chain of layers that replaces a dense conv under a scheme.

__all__ = ["CompositeConv2d", "FactoredConv2d", "build_conv"]

T = TypeVar("T")


class FactoredConv2d(nn.Sequential):
    """Convs in a chain with nothing between them, so that together they are one linear map.

    Its children are `basis` and `join`, `first` and `second` for a separable pair, or `reduce`, `upright`, `lying`
    and `join` for a CP form, whose middle two are depthwise.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.build_conv(16, 32, 3, "separable", padding=1)
    >>> type(layer).__name__, layer(torch.zeros(1, 16, 8, 8)).shape[1]
    ('FactoredConv2d', 32)
    """

    __jit_unused_properties__: ClassVar[list[str]] = [
        "weight", "bias", "in_channels", "out_channels", "groups", "kernel_size", "stride", "dilation",
        "padding", "padding_mode",
    ]  # fmt: skip

    def __init__(self, stages: OrderedDict[str, nn.Module], scheme: Scheme) -> None:
        super().__init__(stages)
        self.scheme = scheme

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent dense conv, with gradients, for tools that inspect weights."""
        first, *rest = (stage.weight for stage in self.children())
        if self.scheme.name == "cp":
            upright, lying, join = rest
            return compose(first * upright * lying, join)  # type: ignore[operator, arg-type]
        return compose(ungrouped(first, self[0].groups // self.groups), *rest, groups=self.groups)  # type: ignore[arg-type, operator]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the last layer, which is that of the whole chain if no other layer has one."""
        return self[-1].bias  # type: ignore[return-value]

    @property
    def in_channels(self) -> int:
        return self[0].in_channels  # type: ignore[return-value]

    @property
    def out_channels(self) -> int:
        return self[-1].out_channels  # type: ignore[return-value]

    @property
    def groups(self) -> int:
        """Those of the last layer: a join mixes what a basis kept apart."""
        return self[-1].groups  # type: ignore[return-value]

    @property
    def kernel_size(self) -> Pair:
        """The kernel of the equivalent dense conv."""
        stages: Any = self
        return max(stage.kernel_size[0] for stage in stages), max(stage.kernel_size[1] for stage in stages)

    @property
    def stride(self) -> Pair:
        stages: Any = self
        return math.prod(stage.stride[0] for stage in stages), math.prod(stage.stride[1] for stage in stages)

    @property
    def dilation(self) -> Pair:
        stages: Any = self
        return max(stage.dilation[0] for stage in stages), max(stage.dilation[1] for stage in stages)

    @property
    def padding(self) -> Sides:
        """Pixels on the sides of each axis, ((top, bottom), (left, right)), as a composite layer has them."""
        sides = [_sides_of(stage) for stage in self]
        (top, bottom), (left, right) = (
            [max(side) for side in zip(*axis, strict=True)] for axis in zip(*sides, strict=True)
        )
        return (top, bottom), (left, right)

    @property
    def padding_mode(self) -> str:
        stages: Any = self  # those that pad nothing have the default
        return next((stage.padding_mode for stage in stages if stage.padding_mode != "zeros"), "zeros")


def build_conv(
    in_channels: int,
    filters: int,
    kernel: int | Sequence[int],
    scheme: str | Scheme = "dense",
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "same",
    dilation: int | Sequence[int] = 1,
    channel_groups: int = 1,
    padding_mode: str = "zeros",
    bias: bool | Literal["last"] = True,
) -> nn.Module:
    """Build the layer, or chain of layers, that replaces a dense conv under a scheme.

    A basis takes the stride, padding and dilation of the dense conv and its join none; the halves of a separable
    pair and the strips of a CP form take those of the axis they run along. With bias="last" a chain has a bias in
    its last layer alone, so that it can be merged exactly; a CP form never has another.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.build_conv(64, 128, 3, "lr", padding=1)
    >>> layer(torch.zeros(1, 64, 8, 8)).shape[1]
    128
    """
    scheme, kernel = parse_scheme(scheme).for_layer(in_channels, filters, channel_groups), pair(kernel, "kernel")
    stages = scheme.stages(kernel, filters, channel_groups=channel_groups)
    stride, dilation = pair(stride, "stride"), pair(dilation, "dilation")
    sides = enclosing_padding(padding, kernel, dilation)
    common = {"channel_groups": channel_groups, "padding_mode": padding_mode}
    parts = {"channel_groups": channel_groups * scheme.channel_groups}
    whole = {
        "stride": stride,
        "padding": recentred(sides, kernel, stages[0].kernel, dilation),
        "dilation": dilation,
    }
    first = branched_conv if scheme.branches else conv_of
    if len(stages) == 1:
        shuffle = scheme.channel_groups > 1
        return first(in_channels, stages[0], **(whole | common | parts), shuffle=shuffle, bias=bool(bias))

    def along(axis: int, stage: Composite) -> dict[str, Any]:
        return _along(axis, whole, sides, kernel, stage) | common

    places = [whole | common | parts, {"padding": 0} | common]
    names: tuple[str, ...] = ("basis", "join")
    if scheme.name == "separable":
        places = [along(axis, stage) for axis, stage in zip(_axes(scheme), stages, strict=True)]
        names = ("first", "second")
    elif scheme.name == "cp":
        strips = [along(axis, stages[1 + axis]) | {"channel_groups": stages[0].filters} for axis in (0, 1)]
        places, names = [{"padding": 0}, *strips, {"padding": 0}], ("reduce", "upright", "lying", "join")
    depths = (in_channels, *(stage.filters for stage in stages[:-1]))
    biases = [bias is True and scheme.name != "cp"] * (len(stages) - 1) + [bool(bias)]
    rows = zip(names, depths, stages, places, biases, strict=True)
    make = {"basis": first}
    layers = {name: make.get(name, conv_of)(depth, s, **place, bias=own) for name, depth, s, place, own in rows}
    return FactoredConv2d(OrderedDict(layers), scheme)


def _sides_of(stage: Any) -> Sides:
    """The padding of one layer of a chain, for each side."""
    if isinstance(stage, CompositeConv2d | BranchedConv2d):
        return stage.padding
    height, width = stage.padding
    return (height, height), (width, width)


def _axes(scheme: Scheme) -> tuple[int, int]:
    """The axis (0 vertical, 1 horizontal) along which each half of a separable scheme runs."""
    return (0, 1) if scheme.shapes[0][0].endswith("x1") else (1, 0)


def _along(axis: int, whole: dict[str, Any], sides: Sides, kernel: Pair, stage: Composite) -> dict[str, Any]:
    """The stride, dilation and padding of a dense conv along one axis, and none along the other."""
    sides = recentred(sides, kernel, stage.kernel, whole["dilation"])
    return {
        "stride": _only(axis, whole["stride"], 1),
        "dilation": _only(axis, whole["dilation"], 1),
        "padding": _only(axis, sides, (0, 0)),
    }


def _only(axis: int, both: tuple[T, T], otherwise: T) -> tuple[T, T]:
    return (both[0], otherwise) if axis == 0 else (otherwise, both[1])


# The cost of what replaces a conv under a scheme, in multiply-accumulates per output pixel.


def macs_per_pixel(conv: nn.Conv2d, scheme: Scheme) -> int:
    """MACs per output pixel of what replaces a conv; for the conv itself this is its number of weights.

    The first half of a separable pair has the stride of its own axis alone, and so computes more pixels; the first
    layer of a CP form has none.
    """
    if not isinstance(conv, nn.Conv2d):
        return channel_macs(conv, basis_filters(conv, scheme))
    first, *rest = stage_weights(conv, scheme)
    rows, columns = conv.stride
    if scheme.name == "cp":
        upright, *rest = rest
        return first * rows * columns + upright * columns + sum(rest)
    if scheme.name == "separable":
        first *= rows if scheme.shapes[0][0].startswith("1x") else columns
    return first + sum(rest)


def stage_weights(conv: nn.Conv2d, scheme: Scheme) -> list[int]:
    """The number of weights of each layer that replaces a conv."""
    scheme = scheme.for_layer(conv.in_channels, conv.out_channels, conv.groups)
    stages = scheme.stages(conv.kernel_size, conv.out_channels, channel_groups=conv.groups)  # type: ignore[arg-type]
    depth, inner = conv.in_channels // conv.groups // scheme.channel_groups, stages[0].filters // conv.groups
    depths = [1, 1, inner] if scheme.name == "cp" else [inner] * (len(stages) - 1)
    return [stage.weights(channels) for stage, channels in zip(stages, (depth, *depths), strict=True)]


def relative_cost(conv: nn.Conv2d, scheme: Scheme) -> float:
    """The MACs of what replaces a conv, as a share of its own."""
    return macs_per_pixel(conv, scheme) / conv.weight.numel()


def useful_rank(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The number of basis filters per channel group beyond which a fit does not improve."""
    if not isinstance(conv, nn.Conv2d):
        return channel_rank(conv)
    if scheme.name == "cp":
        return conv.weight.numel() // max(conv.weight.shape)
    depth, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    many = replace(scheme, m=1000 * len(scheme.shapes))
    first = many.stages(conv.kernel_size, conv.out_channels)[0]  # type: ignore[arg-type]
    if scheme.name == "separable":
        lying = first.kernel[0] == 1
        (height, width), taps = conv.kernel_size, first.groups[0].taps
        return min(depth * taps, filters * (height if lying else width))
    return max(ceil(min(filters, depth * g.taps) * Fraction(first.filters, g.filters)) for g in first.groups)


# Give the layers that replace a trained conv the filters nearest to its own.


@torch.no_grad()
def fit_layer(
    name: str,
    conv: nn.Conv2d,
    layer: nn.Module,
    covariance: Tensor | None = None,
    *,
    factors: CPFactors | None = None,
) -> Fitted:
    """Give a chain that replaces a conv the filters nearest to it. It can be passed to `convert` as `init`.

    With the `covariance` of the windows that the first half of a separable pair reads, filters are nearest in what
    they give for such inputs, and not in their weights. The `factors` of a CP form are computed unless given.
    """
    if isinstance(layer, FactoredLayer):
        return Fitted(name, outputs_of(layer[0]), fit_factored(conv, layer))
    if not isinstance(layer, FactoredConv2d):
        raise LowRankError(f"{name} was replaced by a {type(layer).__name__}, which mixes nothing: use lr-join.")
    if layer.scheme.name == "cp":
        return _fit_cp(name, conv, layer, factors)
    weight = conv.weight.detach().double()
    first, second = layer.children()
    if layer.scheme.name == "separable":
        upright, lying = sorted((first, second), key=lambda half: kernel_of(half)[0] == 1)
        target = centred(weight, (kernel_of(upright)[0], kernel_of(lying)[1]))
        options = {"lying_first": first is lying, "groups": conv.groups, "covariance": covariance}
        halves = separable_factors(target, filters_of(first), **options)
        filled, fitted = ([halves[0]], [halves[1]]), compose(*halves, groups=conv.groups)
    else:
        basis, join = grouped_factors(weight, conv, layer.scheme)
        filled, fitted = (basis, [join]), grouped_weight(basis, join, conv.groups)
    for stage, tensors in zip((first, second), filled, strict=True):
        _fill(stage, tensors)
    if conv.bias is not None:
        second.bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)
    return Fitted(name, filters_of(first), kept_energy(weight, fitted))


def _fit_cp(name: str, conv: nn.Conv2d, layer: FactoredConv2d, factors: CPFactors | None) -> Fitted:
    found = factors or cp_factors(conv.weight, filters_of(layer[0]))
    if found is None:
        raise LowRankError(f"tensorly finds no CP form of {name or 'the conv'}: use separable there.")
    *tensors, energy = found
    for stage, tensor in zip(layer.children(), tensors, strict=True):
        _fill(stage, [tensor])
    if conv.bias is not None:
        layer[-1].bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)
    return Fitted(name, filters_of(layer[0]), energy)


def grouped_factors(
    weight: Tensor, conv: nn.Conv2d, scheme: Scheme, *, sweeps: int = 30
) -> tuple[list[Tensor], Tensor]:
    """A basis and its join for each channel group by itself, put together as the layers hold them."""
    groups = conv.groups
    whole = scheme.stages(conv.kernel_size, conv.out_channels, channel_groups=groups)[0]  # type: ignore[arg-type]
    own = Composite(tuple(FilterGroup(g.height, g.width, g.filters // groups) for g in whole.groups))
    parts = [crossed_factors(part, own, sweeps=sweeps) for part in weight.chunk(groups)]
    basis = [torch.cat(filters) for filters in zip(*(filters for filters, _ in parts), strict=True)]
    return basis, torch.cat([join for _, join in parts])


def grouped_weight(basis: Sequence[Tensor], join: Tensor, groups: int) -> Tensor:
    """The dense weight that equals a basis and its join, group by group."""
    apart = zip(*(filters.chunk(groups) for filters in basis), strict=True)
    return torch.cat([crossed_weight(own, part) for own, part in zip(apart, join.chunk(groups), strict=True)])


def kernel_of(stage: nn.Module) -> tuple[int, int]:
    return stage.kernel_size  # type: ignore[return-value]


def filters_of(stage: nn.Module) -> int:
    return stage.out_channels  # type: ignore[return-value]


def _fill(stage: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Set the weights of a layer, and its bias to zero."""
    for weight, tensor in zip(weights_of(stage), tensors, strict=True):
        weight.copy_(tensor)
    if stage.bias is not None:
        stage.bias.zero_()  # type: ignore[operator, union-attr]
