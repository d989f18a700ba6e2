"""Labels beside points, placed so that none lies on another, on a mark or outside the axes.

Points are labelled one after the other, each at the nearest free place. Which labels find room hangs on the order:
several orders are tried, and the one that leaves the fewest out and the rest nearest to their points is kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = tuple[float, float]

SIZE = 7.8
LINE = "#8a929c"
FAR = 10.0
"""A label further from its point than this, in points, gets a line to it."""
CLEAR = 1.5
"""A label without a line is so many times further from every other mark than from its own."""
ORDERS = 40
MARK = 5.0
_SHARE = {"left": 0.0, "bottom": 0.0, "center": 0.5, "right": 1.0, "top": 1.0}
_AROUND = (
    (7, 0, "left", "center"),
    (-7, 0, "right", "center"),
    (0, 6, "center", "bottom"),
    (0, -6, "center", "top"),
    (6, 5, "left", "bottom"),
    (6, -5, "left", "top"),
    (-6, 5, "right", "bottom"),
    (-6, -5, "right", "top"),
    (3, 7, "left", "bottom"),
    (3, -7, "left", "top"),
    (-3, 7, "right", "bottom"),
    (-3, -7, "right", "top"),
)
_RINGS = (1.0, 1.7, 2.4, 3.2, 4.0, 5.0, 6.0, 7.5, 9.0)


@dataclass(frozen=True)
class Box:
    """A rectangle on the canvas, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        apart = self.left >= other.right or other.left >= self.right
        return not apart and self.bottom < other.top and other.bottom < self.top

    def gap(self, point: Place) -> float:
        """How far a point is from the rectangle."""
        across = max(self.left - point[0], point[0] - self.right, 0.0)
        return hypot(across, max(self.bottom - point[1], point[1] - self.top, 0.0))

    def inside(self, other: Box) -> bool:
        across = self.left >= other.left and self.right <= other.right
        return across and self.bottom >= other.bottom and self.top <= other.top


@dataclass(frozen=True)
class Spot:
    """Where a label may stand: shifted from its point, and which of its corners the shift leads to."""

    dx: float
    dy: float
    ha: str
    va: str

    @property
    def distance(self) -> float:
        return hypot(self.dx, self.dy)

    def box(self, point: Place, size: Place) -> Box:
        left = point[0] + self.dx - _SHARE[self.ha] * size[0]
        bottom = point[1] + self.dy - _SHARE[self.va] * size[1]
        return Box(left, bottom, left + size[0], bottom + size[1])

    def leader(self, point: Place) -> Iterator[Box]:
        """The line to a point that is far, as dots: from beyond its mark and beyond what that mark lies on."""
        dots = int(self.distance / 3) if self.distance > FAR else 0
        for dot in range(dots):
            part = (dot + 0.5) / dots
            if part * self.distance > 2 * MARK:
                yield around(point[0] + self.dx * part, point[1] + self.dy * part, 1.0)


SPOTS = tuple(Spot(ring * dx, ring * dy, ha, va) for ring in _RINGS for dx, dy, ha, va in _AROUND)


def place_labels(
    axes: Axes, points: Sequence[Place], names: Sequence[str], *, lines: Sequence[Sequence[Place]] = ()
) -> None:
    """Write each name by its point, clear of marks and lines. The figure's layout must be settled before."""
    figure: Any = axes.figure
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    limits = Box(frame.x0 / scale, frame.y0 / scale, frame.x1 / scale, frame.y1 / scale)
    places = [_place(axes, point, scale) for point in points]
    sizes = [_size(axes, name, renderer, scale) for name in names]
    stairs = [box for line in lines for box in _along([_place(axes, point, scale) for point in line])]
    for point, name, spot in zip(points, names, arrange(places, sizes, limits, stairs), strict=True):
        if spot is not None:
            _write(axes, name, point, spot)


def arrange(
    places: Sequence[Place], sizes: Sequence[Place], limits: Box, lines: Sequence[Box] = ()
) -> list[Spot | None]:
    """A spot for the label of every point; None where no order of placing finds it one."""
    best: list[Spot | None] = []
    least = (len(places) + 1, 0.0)
    for order in _orders(places):
        spots = _in_order(order, places, sizes, limits, lines)
        score = spots.count(None), sum(spot.distance for spot in spots if spot)
        if score < least:
            best, least = spots, score
        if not any(spot is None or spot.distance > FAR for spot in best):
            break
    return best


def _orders(places: Sequence[Place]) -> Iterator[list[int]]:
    """The most crowded first, while there is a choice; then at random, the same every time."""
    order = sorted(range(len(places)), key=lambda i: _room(places, i))
    yield order
    chance = random.Random(0)
    for _ in range(ORDERS):
        yield chance.sample(order, len(order))


def _room(places: Sequence[Place], i: int) -> float:
    x, y = places[i]
    return min((hypot(x - u, y - v) for j, (u, v) in enumerate(places) if j != i), default=0.0)


def _in_order(
    order: Sequence[int], places: Sequence[Place], sizes: Sequence[Place], limits: Box, lines: Sequence[Box]
) -> list[Spot | None]:
    chosen: list[Spot | None] = [None] * len(places)
    taken = [around(x, y, MARK) for x, y in places]
    for i in order:
        others = [*places[:i], *places[i + 1 :]]
        fitting = (s for s in SPOTS if _free(s, places[i], sizes[i], limits, taken, lines))
        spot = next((s for s in fitting if _plain(s, places[i], sizes[i], others)), None)
        if spot is not None:
            taken += [spot.box(places[i], sizes[i]), *spot.leader(places[i])]
            chosen[i] = spot
    return chosen


def _free(spot: Spot, place: Place, size: Place, limits: Box, taken: Sequence[Box], lines: Sequence[Box]) -> bool:
    """A label keeps clear of everything; the line that leads to it may cross other lines."""
    box = spot.box(place, size)
    if not box.inside(limits) or any(box.meets(other) for other in (*taken, *lines)):
        return False
    return not any(dot.meets(other) for dot in spot.leader(place) for other in taken)


def _plain(spot: Spot, place: Place, size: Place, others: Sequence[Place]) -> bool:
    """Whether a reader takes the label for that of its point: a line leads to it, or no other mark is near."""
    box = spot.box(place, size)
    return spot.distance > FAR or all(box.gap(other) >= CLEAR * box.gap(place) for other in others)


def _write(axes: Axes, name: str, point: Place, spot: Spot) -> None:
    line = {"arrowstyle": "-", "color": LINE, "lw": 0.7, "shrinkA": 0, "shrinkB": 3}
    line["relpos"] = _SHARE[spot.ha], _SHARE[spot.va]
    options = {"textcoords": "offset points", "fontsize": SIZE, "ha": spot.ha, "va": spot.va}
    options["arrowprops"] = line if spot.distance > FAR else None
    axes.annotate(name, point, (spot.dx, spot.dy), **options)


def _size(axes: Axes, name: str, renderer: Any, scale: float) -> Place:
    text = axes.text(0, 0, name, fontsize=SIZE)
    extent = text.get_window_extent(renderer)
    text.remove()
    return extent.width / scale + 2, extent.height / scale + 1


def _along(places: Sequence[Place]) -> Iterator[Box]:
    """A line of upright and level pieces, as thin boxes."""
    for (x0, y0), (x1, y1) in pairwise(places):
        yield Box(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1)


def _place(axes: Axes, point: Place, scale: float) -> Place:
    x, y = axes.transData.transform(point)
    return float(x) / scale, float(y) / scale


def around(x: float, y: float, reach: float) -> Box:
    return Box(x - reach, y - reach, x + reach, y + reach)
