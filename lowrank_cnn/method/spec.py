"""What a low-rank layer is, as data: filter groups, and composites of them.

A *filter group* is `filters` filters of `height` x `width`. A *composite* is several groups over the same
input, their outputs concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowrank_cnn.core.errors import LowRankError

Pair = tuple[int, int]


@dataclass(frozen=True)
class FilterGroup:
    """`filters` filters, each `height` x `width` pixels and as deep as the input.

    >>> import lowrank_cnn as lr
    >>> lr.FilterGroup(3, 1, 32)
    FilterGroup(height=3, width=1, filters=32)
    """

    height: int
    width: int
    filters: int

    def __post_init__(self) -> None:
        if any(not isinstance(v, int) or v < 1 for v in (self.height, self.width, self.filters)):
            raise LowRankError(f"a filter group needs a positive height, width and filters, not {self!s}.")

    def __str__(self) -> str:
        return f"{self.height}x{self.width},{self.filters}"

    @property
    def taps(self) -> int:
        """Weights of one filter per input channel."""
        return self.height * self.width


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

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))

    @classmethod
    def of(cls, groups: Composite | Iterable[FilterGroup | Sequence[int]]) -> Composite:
        """Accept groups as `FilterGroup`s or `(height, width, filters)` tuples."""
        if isinstance(groups, Composite):
            return groups
        if not isinstance(groups, Iterable):
            raise LowRankError(f"the groups of a composite are (height, width, filters) each, not {groups!r}.")
        return cls(tuple(_as_group(group) for group in groups))

    @property
    def filters(self) -> int:
        """Filters of all groups: the channels that the composite gives."""
        return sum(group.filters for group in self.groups)

    @property
    def kernel(self) -> Pair:
        """The smallest kernel that encloses every group."""
        return max(g.height for g in self.groups), max(g.width for g in self.groups)

    @property
    def fan_out(self) -> int:
        """Outgoing connections of one input value: the sum of h_i * w_i * d_i over the groups."""
        return sum(group.taps * group.filters for group in self.groups)

    def weights(self, in_channels: int) -> int:
        """Weights without biases; also the multiply-accumulates per output pixel."""
        return in_channels * self.fan_out


def _as_group(group: FilterGroup | Sequence[int]) -> FilterGroup:
    if isinstance(group, FilterGroup):
        return group
    if not isinstance(group, Sequence) or len(group) != 3:
        raise LowRankError(f"a filter group is (height, width, filters), not {group!r}.")
    return FilterGroup(*group)
