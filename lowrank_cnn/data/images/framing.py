"""From an encoded image to the window that a network sees: decode, scale by the shorter side, crop, mirror.

Pillow decodes, and scales only the part that the window shows. A colour JPEG that is stored at the right scale
already, as `lowrank shrink` writes them, is decoded by simplejpeg if that is installed: the same pixels, a third
faster (`benchmarks/input_pipeline.py`).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.images.decode import (
    BadImageError,
    cover_and_crop,
    crop_at,
    decode_image,
    open_image,
    orientation,
    resize_window,
    scale_shorter,
)
from lowrank_cnn.system.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 2**26
"""Pixels of the largest image that a GPU is given to decode: fewer than Pillow refuses."""
_JPEG_START, _JPEG_END, _EXIF = b"\xff\xd8\xff", b"\xff\xd9", b"Exif\0\0"
_SUBSAMPLINGS = {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)}
"""Brightness samples across and down for one sample of colour: 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1."""


class ScaledCrop(NamedTuple):
    """How a decoded image becomes a window: scaled from one size to another, cut out at a corner, mirrored."""

    whole: tuple[int, int]
    scaled: tuple[int, int]
    corner: tuple[int, int]
    mirrored: bool

    @property
    def pixels(self) -> int:
        return self.whole[0] * self.whole[1]


@dataclass(frozen=True)
class Framing:
    """How an image becomes a window: brought to `size` if there is one, scaled, then cropped.

    `draws` of the methods are three numbers from 0 to 1 for a random window that may be mirrored; None stands for
    the centre.
    """

    window: tuple[int, int]
    size: tuple[int, int] | None
    resize: int | None
    pad: int
    mirror: bool
    fill: tuple[int, ...]

    @property
    def at_least(self) -> int:
        """How far a decoder may scale the image down.

        An image that comes to `size` first is decoded for that, as sets that are held in memory are: both show the
        same pixels, also where `resize` is larger.
        """
        return max(self.size) if self.size else self.resize or 0

    def __call__(self, image: Image, draws: list[float] | None) -> Image:
        """The window of a decoded image."""
        if self.size:
            image = cover_and_crop(image, *self.size)
        top, left = self.corner(*scaled(image.height, image.width, self.resize), draws)
        height, width = self.window
        if self.resize and not self.pad:
            image = resize_window(image, self.resize, top, left, height, width)
        else:
            image = scale_shorter(image, self.resize) if self.resize else image
            image = crop_at(image, top, left, height, width, fill=self.fill)
        if self.mirrored(draws):
            pillow = require("PIL.Image", extra="data", purpose="mirroring images")
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        return image

    def corner(self, height: int, width: int, draws: list[float] | None) -> tuple[int, int]:
        """Top and left of the window in the scaled image; negative where padding shows."""
        pad = self.pad if draws else 0
        top = _offset(height + 2 * pad - self.window[0], draws[0] if draws else None)
        left = _offset(width + 2 * pad - self.window[1], draws[1] if draws else None)
        return top - pad, left - pad

    def mirrored(self, draws: list[float] | None) -> bool:
        return bool(draws) and self.mirror and draws[2] < 0.5

    def scaled_crop(self, data: bytes, draws: list[float] | None) -> ScaledCrop | None:
        """The window of a JPEG that a GPU can decode; None for others and for one to be fitted to `size` first."""
        whole = plain_jpeg_size(data)
        if whole is None or self.size not in (None, whole):
            return None
        to = scaled(*whole, self.resize)
        return ScaledCrop(whole, to, self.corner(*to, draws), self.mirrored(draws))


def frame_image(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    """The window of an encoded image as bytes [h, w, C]."""
    if channels == 3 and (window := _cut_by_simplejpeg(data, framing, draws)) is not None:
        return window
    return framing(decode_image(data, channels=channels, at_least=framing.at_least), draws).tobytes()


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a whole, upright baseline JPEG in YCbCr of 8 bits, by its header; None for all others.

    Progressive JPEGs do not count: hardware decodes none, and many workers decode them faster than nvJPEG's one
    thread.
    """
    if not data.startswith(_JPEG_START) or not data.rstrip(b"\0").endswith(_JPEG_END):
        return None
    try:
        image = open_image(data)
    except BadImageError:
        return None
    layers = getattr(image, "layer", [])  # for each component: its name, samples across and down, and its table
    samples = [layer[1:3] for layer in layers]
    plain = (
        (image.format, image.mode) == ("JPEG", "RGB")
        and getattr(image, "tile", [])  # the header ends with a scan
        and "progressive" not in image.info
        and image.info.get("adobe_transform", 1) == 1
        and [layer[0] for layer in layers] != [*b"RGB"]
        and samples[1:] == [(1, 1), (1, 1)]
        and samples[0] in _SUBSAMPLINGS
        and image.width * image.height <= LARGEST
        and orientation(image) == 1
    )
    return (image.height, image.width) if plain else None


def _cut_by_simplejpeg(data: bytes, framing: Framing, draws: list[float] | None) -> bytes | None:
    """The window of a JPEG that has the right scale; None for others, and where simplejpeg is missing or fails.

    One with EXIF data may have to be turned upright, which Pillow does.

    To mirror the window, all bytes of a row are reversed, so the colours are decoded in reverse order.
    """
    jpeg = _simplejpeg()
    if jpeg is None or framing.pad or not data.startswith(_JPEG_START) or _EXIF in data:
        return None
    mirrored = framing.mirrored(draws)
    try:
        height, width, space, _ = jpeg.decode_jpeg_header(data)
        right_scale = scaled(height, width, framing.resize) == (height, width)
        if space in ("CMYK", "YCCK") or framing.size not in (None, (height, width)) or not right_scale:
            return None
        pixels = jpeg.decode_jpeg(data, "BGR" if mirrored else "RGB")
    except ValueError:  # Pillow decodes what is only odd, and says what is wrong with the rest
        return None
    top, left = framing.corner(height, width, draws)
    rows = pixels.reshape(height, 3 * width)
    window = rows[top : top + framing.window[0], 3 * left : 3 * (left + framing.window[1])]
    return (window[:, ::-1] if mirrored else window).tobytes()


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _offset(margin: int, draw: float | None) -> int:
    return margin // 2 if draw is None else int(draw * (margin + 1))
