"""Low-rank layers as data: filter groups, and composites of them.

A *filter group* is a number of filters of one shape. A *composite* is several groups over the same input, their
outputs concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from lowrank_cnn.core.errors import LowRankError

Pair = tuple[int, int]
Kernel = tuple[int, ...]
"""Sides of a filter: (height, width), or (time, height, width) over volumes."""


@dataclass(frozen=True, init=False)
class FilterGroup:
    """Filters of one shape: `FilterGroup(height, width, filters)`, with one to three sides before the filters.

    Each filter is as deep as the input, or, where `depthwise`, sees one channel. A depthwise group without sides
    passes its channels on: `FilterGroup(60, depthwise=True)` is the identity of 60 channels.

    >>> import lowrank_cnn as lr
    >>> lr.FilterGroup(3, 1, 32).kernel, lr.FilterGroup(3, 3, 3, 16).taps
    ((3, 1), 27)
    >>> print(lr.FilterGroup(7, 7, 96, depthwise=True))
    depthwise 7x7,96
    """

    kernel: tuple[int, ...]
    filters: int
    depthwise: bool

    def __init__(self, *sizes: int, depthwise: bool = False) -> None:
        if not (1 if depthwise else 2) <= len(sizes) <= 4 or any(not isinstance(v, int) or v < 1 for v in sizes):
            told = ", ".join(map(repr, sizes))
            raise LowRankError(f"a filter group has one to three sides and filters, all positive, not ({told}).")
        for name, value in (("kernel", sizes[:-1]), ("filters", sizes[-1]), ("depthwise", depthwise)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        if not self.kernel:
            return f"identity,{self.filters}"
        return f"{'depthwise ' * self.depthwise}{'x'.join(map(str, self.kernel))},{self.filters}"

    @property
    def height(self) -> int:
        return self.kernel[-2] if len(self.kernel) > 1 else 1

    @property
    def width(self) -> int:
        return self.kernel[-1] if self.kernel else 1

    @property
    def taps(self) -> int:
        """Weights of one filter per input channel; an identity has none."""
        return prod(self.kernel) if self.kernel else 0

    def weights(self, in_channels: int) -> int:
        """Weights of all filters, without biases."""
        return self.taps * self.filters * (1 if self.depthwise else in_channels)


@dataclass(frozen=True)
class Composite:
    """Filter groups over the same input, concatenated in this order.

    >>> import lowrank_cnn as lr
    >>> composite = lr.Composite.of([(3, 1, 32), (1, 3, 32)])
    >>> print(composite)
    3x1,32 + 1x3,32
    """

    groups: tuple[FilterGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise LowRankError("a composite needs at least one filter group.")
        if len({len(group.kernel) for group in self.groups if group.kernel}) > 1:
            raise LowRankError(f"the filters of a composite have as many sides each, unlike {self}.")

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))

    @classmethod
    def of(cls, groups: Composite | Iterable[FilterGroup | Sequence[int]]) -> Composite:
        """Accept groups as `FilterGroup`s or `(height, width, filters)` tuples."""
        if isinstance(groups, Composite):
            return groups
        try:
            return cls(tuple(group if isinstance(group, FilterGroup) else FilterGroup(*group) for group in groups))
        except TypeError:
            message = f"the groups of a composite are (height, width, filters) each, not {groups!r}."
            raise LowRankError(message) from None

    @property
    def filters(self) -> int:
        """Filters of all groups: the channels that the composite gives."""
        return sum(group.filters for group in self.groups)

    @property
    def kernel(self) -> Kernel:
        """The smallest kernel that encloses every group."""
        kernels = [group.kernel for group in self.groups if group.kernel] or [(1, 1)]
        return tuple(map(max, zip(*kernels, strict=True)))

    @property
    def depthwise(self) -> bool:
        """Whether any filters see one channel alone."""
        return any(group.depthwise for group in self.groups)

    @property
    def fan_out(self) -> int:
        """Outgoing connections of one input value: the sum of taps_i * d_i over the groups."""
        return sum(group.taps * (1 if group.depthwise else group.filters) for group in self.groups)

    def weights(self, in_channels: int) -> int:
        """Weights without biases; also the multiply-accumulates per output pixel."""
        return sum(group.weights(in_channels) for group in self.groups)


def resolve_shape(shape: str, kernel: Kernel) -> Kernel:
    """The sides of a shape such as kx1, for a dense kernel."""
    return tuple(k if side == "k" else int(side) for side, k in zip(shape.split("x"), kernel, strict=True))
