"""From the bytes of an image file to pixels: any colour mode, any size, and a named reason where it fails."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import MissingExtra, first_line, require
from lowrank_cnn.data.augment import scaled

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose decoders are plain libraries: EPS, say, would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F"}
_DEEP = {"I", "I;16", "I;16B", "I;16L"}

_ORIENTATION, _TURNED = 0x0112, range(5, 9)
"""The EXIF tag of the orientation, and its values for images that are stored on their side."""

UNDECODABLE = "undecodable image"


class BadImageError(Exception):
    """One image that cannot be used, and why."""


def image_header(data: bytes) -> tuple[tuple[int, int], bool]:
    """The height and width of an image and whether it is grey, from its header alone."""
    image = open_image(data)
    size = (image.width, image.height) if orientation(image) in _TURNED else (image.height, image.width)
    return size, image.mode in _GREY


def decode_image(data: bytes, *, channels: int, at_least: int | None = None) -> Image:
    """Decode an image as grey (one channel) or RGB (three). A JPEG may come out smaller, down to `at_least`."""
    image = open_image(data)
    with _bad_image():
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        image.load()
        if orientation(image) != 1:
            image = require("PIL.ImageOps", extra="data", purpose="turning images").exif_transpose(image)
        return _convert(image, channels)


@contextmanager
def _bad_image() -> Iterator[None]:
    """Any error of a decoder as `BadImageError`: OSError, SyntaxError, struct.error, zlib.error and more."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        text = first_line(error)
        text = "not a known image format" if text.startswith("cannot identify") else text
        raise BadImageError(text) from error


def scale_shorter(image: Image, side: int) -> Image:
    """The image at the scale where its shorter side has this length."""
    height, width = scaled(image.height, image.width, side)
    return image if (width, height) == image.size else _resized(image, width, height)


def resize_window(image: Image, side: int, top: int, left: int, height: int, width: int) -> Image:
    """A window of the image at the scale where its shorter side has this length; only the window is computed."""
    whole_height, whole_width = scaled(image.height, image.width, side)
    if (whole_width, whole_height) == image.size:
        return image.crop((left, top, left + width, top + height))
    down, across = image.height / whole_height, image.width / whole_width
    right, bottom = min((left + width) * across, image.width), min((top + height) * down, image.height)
    return _resized(image, width, height, (left * across, top * down, right, bottom))


def cover_and_crop(image: Image, height: int, width: int) -> Image:
    """Scaled to cover the size, then its centre: the image itself where it has the size already."""
    if image.size == (width, height):
        return image
    scale = max(height / image.height, width / image.width)
    whole = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
    return _resized(image, *whole).crop((left, top, left + width, top + height))


def crop_at(image: Image, top: int, left: int, height: int, width: int, *, fill: tuple[int, ...]) -> Image:
    """A window that may reach beyond the image, where it has the colour `fill`."""
    if top >= 0 and left >= 0 and top + height <= image.height and left + width <= image.width:
        return image.crop((left, top, left + width, top + height))
    canvas = _pillow().new(image.mode, (width, height), fill)
    canvas.paste(image, (-left, -top))
    return canvas


def _pillow() -> Any:
    return require("PIL.Image", extra="data", purpose="decoding images")


def _resized(image: Image, width: int, height: int, box: tuple[float, float, float, float] | None = None) -> Image:
    return image.resize((width, height), _pillow().Resampling.BILINEAR, box=box, reducing_gap=3.0)


def stack(pixels: Sequence[bytes], height: int, width: int, channels: int) -> Tensor:
    """The bytes of images of one size as uint8 [n, H, W, C]."""
    joined = bytearray().join(pixels)
    flat = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return flat.view(len(pixels), height, width, channels)


def open_image(data: bytes) -> Image:
    """An image of which only the header is read; a named reason where that fails."""
    pillow = _pillow()
    with _bad_image():
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
    if pillow.MAX_IMAGE_PIXELS and image.width * image.height > pillow.MAX_IMAGE_PIXELS:
        raise BadImageError(f"{image.width}x{image.height} pixels are too many")
    return image


def orientation(image: Image) -> int:
    """The EXIF orientation of a photograph, or 1 if it has none."""
    if image.format == "TIFF" or (image.format == "JPEG" and "exif" not in image.info):
        return 1  # Pillow turns a TIFF itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a damaged tag does not damage the pixels
        return 1
    return found if found in range(1, 9) else 1


def _convert(image: Image, channels: int) -> Image:
    mode = "L" if channels == 1 else "RGB"
    if image.mode == "F":
        raise BadImageError("float pixels, of no known range: save the image with 8 or 16 bits")
    if image.mode in _DEEP:
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


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
        """How far a decoder may scale the image down: to `size` first, which shows what sets in memory show."""
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
        if draws and self.mirror and draws[2] < 0.5:
            image = image.transpose(_pillow().Transpose.FLIP_LEFT_RIGHT)
        return image

    def corner(self, height: int, width: int, draws: list[float] | None) -> tuple[int, int]:
        """Top and left of the window in the scaled image; negative where padding shows."""
        top, left = height - self.window[0], width - self.window[1]
        if draws is None:
            return top // 2, left // 2
        pad = self.pad
        return int(draws[0] * (top + 2 * pad + 1)) - pad, int(draws[1] * (left + 2 * pad + 1)) - pad


SIDE = 96
_QUALITY = 80


def thumbnail(pixels: Tensor | None) -> str | None:
    """An image as a JPEG of at most 96 pixels in a data URI; None without Pillow, and if it is not grey or RGB."""
    if pixels is None or pixels.shape[0] not in (1, 3):
        return None
    try:
        pillow = _pillow()
    except MissingExtra:
        return None
    rows = pixels.permute(1, 2, 0).squeeze(2)
    image, written = pillow.fromarray(rows.contiguous().cpu().numpy()), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(written, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
