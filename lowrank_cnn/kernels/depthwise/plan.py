"""Divide a depthwise layer among the programs of one launch.

A *band* is a run of channels whose filters have one shape; a band without taps passes its channels on. All bands
of a layer run in one launch, so that each pixel is read from memory once: programs that work on the same pixels,
whatever their band, have neighbouring numbers and find them in the cache.

A program takes some channels of one band, its *lanes*, and some *blocks* of output pixels. A thread computes a
block for a few channels (`values`) and reads a pixel once for all taps that need it: a row of 7 results of a 1x11
filter takes 17 reads, not 77.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels.problem import Pair

WARPS = 4
VALUES, NARROW_VALUES, PASSED_VALUES = 2, 4, 8
"""Channels of a thread: with taps, in a band of at most 16 channels, and without taps.

Channels that pass are only copied: more of them keep more reads under way.
"""
MANY_TAPS = 25
"""Filters of so many taps go through their rows in a loop: unrolled, 49 taps take half a minute to compile."""
SPAN, SUMMED_VALUES = 4, 2
"""Rows of such filters, and channels of a thread with taps, in sums: each tap and channel is a register."""
LANES = {64: 1.0, 32: 1.1, 16: 1.25, 8: 1.5}
"""Channels of a program, with what a channel costs."""
PASSED_ROWS = 4
"""Rows of a block whose gradients are summed for a bias alone: enough reads under way."""
IN_STEP = 8
"""Programs of a turn for the band that has the fewest: with more, all bands advance over the pixels more alike."""
MANY = 256
"""The images by which turns are divided."""


class Band(NamedTuple):
    """Channels with filters of one shape: their number, the filters' sides (0 and 0: none), the padding before."""

    channels: int
    height: int
    width: int
    top: int
    left: int

    @property
    def taps(self) -> int:
        return self.height * self.width


class Layer(NamedTuple):
    """A depthwise layer on maps of given sizes: bands, stride, dilation, images, input and output pixels."""

    bands: tuple[Band, ...]
    stride: Pair
    dilation: Pair
    batch: int
    input: Pair
    output: Pair

    @property
    def channels(self) -> int:
        return sum(band.channels for band in self.bands)

    @property
    def taps(self) -> int:
        """Weights of all filters."""
        return sum(band.taps * band.channels for band in self.bands)


class Share(NamedTuple):
    """A band's part of a launch, as the kernels read it: constants of the compiled code."""

    FIRST: int  # its first channel
    CHANNELS: int
    HEIGHT: int
    WIDTH: int
    TOP: int
    LEFT: int
    WEIGHTS: int  # where its weights begin
    ROWS: int  # of a block
    COLUMNS: int
    LANES: int
    BLOCKS: int  # of a program
    SLOT: int  # its first program in a turn
    SLOTS: int  # its programs in a turn
    SPAN: int = 0  # rows of taps that it sums for


class Division(NamedTuple):
    """Programs come in turns; in each, a band has as many as its work takes.

    Shares are the same for every number of images: a compiled kernel serves batches of any size.
    """

    shares: tuple[Share, ...]
    slots: int
    turns: int


@lru_cache(maxsize=1024)
def divided(layer: Layer, *, back: bool = False) -> Division:
    """Divide the results, or with `back` the gradient of the input.

    Bands that advance at different speeds would read the same pixels at different times, and write parts of the
    same sectors of memory: by then neither is in the cache.
    """
    size, unit = (layer.input, layer.stride) if back else (layer.output, (1, 1))
    shares = _shares(layer, size, unit, _values(layer))
    many, programs = ([_programs(share, size, batch) for share in shares] for batch in (MANY, layer.batch))
    slots = [round(IN_STEP * number / min(many)) for number in many]
    return Division(_placed(shares, slots), sum(slots), max(map(ceil_div, programs, slots)))


@lru_cache(maxsize=1024)
def divided_sums(layer: Layer, bias: bool, programs: int) -> Division:
    """Divide the sums over pixels among about so many programs; a turn has one for each part of the channels.

    Bands without taps have nothing to sum unless there is a bias.
    """
    many = [band.taps >= MANY_TAPS for band in layer.bands]
    values = [
        SUMMED_VALUES if band.taps else taken for band, taken in zip(layer.bands, _values(layer), strict=True)
    ]
    shares = _shares(layer, layer.output, (1, 1), values)
    shares = [share._replace(SPAN=SPAN if own else share.HEIGHT) for share, own in zip(shares, many, strict=True)]
    passed = [share._replace(ROWS=PASSED_ROWS) for share in shares if bias and not share.HEIGHT]
    shares = [*passed, *(share for share in shares if share.HEIGHT)]
    parts = [
        ceil_div(share.CHANNELS, share.LANES) * max(1, ceil_div(share.HEIGHT, share.SPAN or 1)) for share in shares
    ]
    most = max(ceil_div(_blocks(share, layer.output, layer.batch), share.BLOCKS) for share in shares)
    turns = min(most, max(1, programs // sum(parts)))
    return Division(_placed(shares, parts), sum(parts), turns)


def _values(layer: Layer) -> list[int]:
    """Channels of a thread for each band. What passes is read as wide as its first and last channel allow."""
    found, first = [], 0
    for band in layer.bands:
        passed = max(VALUES, gcd(PASSED_VALUES, first, band.channels, layer.channels))
        taken = NARROW_VALUES if band.channels <= 16 else VALUES
        found.append(taken if band.taps else passed)
        first += band.channels
    return found


def _placed(shares: Sequence[Share], slots: Sequence[int]) -> tuple[Share, ...]:
    return tuple(s._replace(SLOT=sum(slots[:place]), SLOTS=slots[place]) for place, s in enumerate(shares))


def _shares(layer: Layer, size: Pair, unit: Pair, values: Sequence[int]) -> list[Share]:
    """Each band's share, without a place in a turn."""
    shares: list[Share] = []
    first = weights = 0
    for band, own in zip(layer.bands, values, strict=True):
        lanes = lanes_of(band.channels)
        blocks = max(1, 32 * WARPS * own // lanes)
        shares.append(Share(first, *band, weights, *block_of(band, size, unit), lanes, blocks, 0, 0))
        first, weights = first + band.channels, weights + band.taps * band.channels
    return shares


def _blocks(share: Share, size: Pair, batch: int) -> int:
    return batch * ceil_div(size[0], share.ROWS) * ceil_div(size[1], share.COLUMNS)


def _programs(share: Share, size: Pair, batch: int) -> int:
    return ceil_div(_blocks(share, size, batch), share.BLOCKS) * ceil_div(share.CHANNELS, share.LANES)


def block_of(band: Band, size: Pair, unit: Pair = (1, 1)) -> Pair:
    """Rows and columns of a block: along a strip, or two rows of a square; in units of the stride where asked."""
    height, width = band.height > 1, band.width > 1
    rows = 2 if height and width else _run(size[0], unit[0]) if height else unit[0]
    # A larger block of a square would not fit the registers.
    columns = 1 if height and not width else _run(size[1], unit[1], 7 if height and width else 8)
    return round_up(rows, unit[0]), round_up(columns, unit[1])


def _run(length: int, unit: int, most: int = 8) -> int:
    """The number of pixels in a row that wastes the fewest at the end, from 4 on; at a tie the largest."""
    if length < 4:
        return round_up(length, unit)
    return min((n for n in range(most, 3, -1) if n % unit == 0), key=lambda n: ceil_div(length, n) * n)


def lanes_of(channels: int) -> int:
    """Channels of a program: a power of two that leaves few lanes idle; fewer read memory in smaller pieces."""
    sizes = [size for size in LANES if size < 2 * channels] or [min(LANES)]
    return min(sizes, key=lambda size: ceil_div(channels, size) * size * LANES[size])


def described(
    shape: Sequence[int], bands: Sequence[int], stride: Sequence[int], dilation: Sequence[int], size: Sequence[int]
) -> Layer:
    """The layer that an operator's plain numbers describe: input [N, C, H, W], five numbers per band, output."""
    found = tuple(Band(*bands[place : place + 5]) for place in range(0, len(bands), 5))
    pairs: list[Any] = [tuple(map(int, values)) for values in (stride, dilation, shape[2:], size)]
    return Layer(found, pairs[0], pairs[1], int(shape[0]), pairs[2], pairs[3])
