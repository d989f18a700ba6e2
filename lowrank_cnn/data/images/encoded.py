"""What a worker hands on as it is read: plain colour JPEGs, and how each becomes a window once it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.images.framing import Framing

LARGEST = 2**26
"""Pixels of the largest image that a device is given: less than Pillow refuses."""
_START, _END = b"\xff\xd8", b"\xff\xd9"
_BASELINE, _SCAN, _ADOBE = 0xC0, 0xDA, 0xEE
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}
_SAMPLINGS = {0x11, 0x21, 0x12, 0x22, 0x41}
"""Of brightness, to one sample of each colour: 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1."""


class Window(NamedTuple):
    """How a decoded image becomes what a network sees: scaled from one size to another, cut out, mirrored."""

    whole: tuple[int, int]
    scaled: tuple[int, int]
    corner: tuple[int, int]
    mirrored: bool

    @property
    def pixels(self) -> int:
        return self.whole[0] * self.whole[1]


@dataclass(frozen=True)
class Encoded:
    """The images of a part: JPEGs one behind the other, with a window each, and None for what a worker framed.

    `places` are those of the images among all that the part was to hold.
    """

    data: Tensor
    lengths: list[int]
    windows: list[Window | None]
    places: list[int]

    def jpegs(self) -> list[tuple[Tensor, Window]]:
        """Every JPEG with its window, no byte copied."""
        windows = [window for window in self.windows if window]
        return list(zip(self.data.split(self.lengths), windows, strict=True)) if windows else []

    def pin_memory(self) -> Encoded:
        """What torch's DataLoader asks of what it loads for a GPU."""
        return replace(self, data=self.data.pin_memory())


def join(images: Sequence[bytes], windows: list[Window | None], places: list[int]) -> Encoded:
    """A part from its JPEGs and the windows of all its images."""
    joined = bytearray().join(images)
    data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return Encoded(data, [len(image) for image in images], windows, places)


def window_of(data: bytes, framing: Framing, draws: list[float] | None) -> Window | None:
    """The window of an image that a device decodes; None for what is no plain JPEG, or has to be fitted first."""
    whole = plain_size(data)
    if whole is None or framing.size not in (None, whole):
        return None
    to = scaled(*whole, framing.resize)
    return Window(whole, to, framing.corner(*to, draws), framing.mirrored(draws))


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that every decoder takes alike; None for all that is rare, odd or cut short.

    Plain is a baseline JPEG of one scan, in YCbCr of eight bits. Progressive ones are not: hardware decodes none,
    and many workers decode them faster than nvJPEG's one thread.
    """
    if not data.startswith(_START) or not data.rstrip(b"\0").endswith(_END):
        return None
    at, size = len(_START), None
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, body = data[at + 1], at + 4
        if marker == 0xFF:  # bytes that fill up
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : body])
        if marker in _BARE or end < body or end > len(data):
            return None
        segment = data[body:end]
        if marker == _SCAN:
            return size if segment[:1] == b"\x03" else None
        if marker in _FRAMES:
            size = _colour_size(segment) if marker == _BASELINE else None
            if size is None:
                return None
        elif marker == _ADOBE and segment.startswith(b"Adobe") and segment[11:12] != b"\x01":
            return None  # RGB or CMYK
        at = end
    return None


def _colour_size(frame: bytes) -> tuple[int, int] | None:
    """Height and width of a frame of brightness and two colours."""
    if len(frame) != 15 or frame[0] != 8 or frame[5] != 3 or frame[6::3] == b"RGB":
        return None
    height, width = int.from_bytes(frame[1:3]), int.from_bytes(frame[3:5])
    brightness, *colours = frame[7::3]
    plain = brightness in _SAMPLINGS and colours == [0x11, 0x11] and 0 < height * width <= LARGEST
    return (height, width) if plain else None
