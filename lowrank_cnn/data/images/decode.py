"""From the bytes of an image file to pixels: any colour mode, any size, and a named reason where it fails."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.system.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose decoders are plain libraries: EPS, say, would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F"}
_DEEP = {"I", "I;16", "I;16B", "I;16L"}

_ORIENTATION, _TURNED = 0x0112, range(5, 9)
"""The EXIF tag for how a camera was held, and its values for images that lie on their side."""

UNDECODABLE = "undecodable image"


class BadImageError(Exception):
    """One image that cannot be used, and why."""


@dataclass(frozen=True)
class ImageHeader:
    """What the header of an image file tells: its height and width and whether it is grey."""

    height: int
    width: int
    grey: bool


def image_header(data: bytes) -> ImageHeader:
    """Read the header alone."""
    image = open_image(data)
    height, width = (image.width, image.height) if orientation(image) in _TURNED else (image.height, image.width)
    return ImageHeader(height, width, image.mode in _GREY)


def decode_image(data: bytes, *, channels: int, at_least: int | None = None) -> Image:
    """A grey (one channel) or RGB (three) image, upright; a JPEG may come smaller, of this size or more."""
    image = open_image(data)
    try:
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        image.load()
        return _convert(_upright(image), channels)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
        raise BadImageError(_reason(error)) from error


def scale_shorter(image: Image, side: int) -> Image:
    """The image at the scale where its shorter side has this length."""
    pillow = require("PIL.Image", extra="data", purpose="resizing images")
    height, width = scaled(image.height, image.width, side)
    size = (width, height)
    return image if size == image.size else image.resize(size, pillow.Resampling.BILINEAR, reducing_gap=3.0)


def resize_window(image: Image, side: int, top: int, left: int, height: int, width: int) -> Image:
    """A window of the image at the scale where its shorter side has this length; only the window is computed."""
    whole_height, whole_width = scaled(image.height, image.width, side)
    if (whole_width, whole_height) == image.size:
        return image.crop((left, top, left + width, top + height))
    pillow = require("PIL.Image", extra="data", purpose="resizing images")
    down, across = image.height / whole_height, image.width / whole_width
    right, bottom = min((left + width) * across, image.width), min((top + height) * down, image.height)
    box = (left * across, top * down, right, bottom)
    return image.resize((width, height), pillow.Resampling.BILINEAR, box=box, reducing_gap=3.0)


def cover_and_crop(image: Image, height: int, width: int) -> Image:
    """Scaled to cover the size, then its centre: the image itself where it has the size already."""
    if image.size == (width, height):
        return image
    pillow = require("PIL.Image", extra="data", purpose="resizing images")
    scale = max(height / image.height, width / image.width)
    whole = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
    scaled = image.resize(whole, pillow.Resampling.BILINEAR, reducing_gap=3.0)
    return scaled.crop((left, top, left + width, top + height))


def crop_at(image: Image, top: int, left: int, height: int, width: int, *, fill: tuple[int, ...]) -> Image:
    """A window that may reach beyond the image, where it has the colour `fill`."""
    inside = top >= 0 and left >= 0 and top + height <= image.height and left + width <= image.width
    if inside:
        return image.crop((left, top, left + width, top + height))
    pillow = require("PIL.Image", extra="data", purpose="padding images")
    canvas = pillow.new(image.mode, (width, height), fill)
    canvas.paste(image, (-left, -top))
    return canvas


def stack(pixels: Sequence[bytes], height: int, width: int, channels: int) -> Tensor:
    """The bytes of images of one size as uint8 [n, H, W, C]."""
    if not pixels:
        return torch.empty(0, height, width, channels, dtype=torch.uint8)
    joined = bytearray().join(pixels)
    return torch.frombuffer(joined, dtype=torch.uint8).view(-1, height, width, channels)


def open_image(data: bytes) -> Image:
    """An image of which only the header is read; a named reason where that fails."""
    pillow = require("PIL.Image", extra="data", purpose="decoding images")
    try:
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # unknown format, broken header, decompression bomb
        raise BadImageError(_reason(error)) from error
    if pillow.MAX_IMAGE_PIXELS and image.width * image.height > pillow.MAX_IMAGE_PIXELS:
        raise BadImageError(f"{image.width}x{image.height} pixels are too many")
    return image


def orientation(image: Image) -> int:
    """How a camera was held, by the EXIF tag of a photograph: 1 for upright images and those that do not say."""
    if image.format == "TIFF" or (image.format == "JPEG" and "exif" not in image.info):
        return 1  # Pillow turns a TIFF itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a damaged tag does not damage the pixels
        return 1
    return found if found in range(1, 9) else 1


def _upright(image: Image) -> Image:
    if orientation(image) == 1:
        return image
    return require("PIL.ImageOps", extra="data", purpose="turning images").exif_transpose(image)


def _convert(image: Image, channels: int) -> Image:
    mode = "L" if channels == 1 else "RGB"
    if image.mode == "F":
        image = _from_floats(image)
    if image.mode in _DEEP:
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _from_floats(image: Image) -> Image:
    """Floats from 0 to 1 are scaled to bytes, and those from 0 to 255 rounded; others have no known range."""
    numpy = require("numpy", extra="data", purpose="decoding images")
    pillow = require("PIL.Image", extra="data", purpose="decoding images")
    values = numpy.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # nor where one is not a number
        raise BadImageError(f"float pixels from {low:g} to {high:g}: save the image with 8 or 16 bits")
    return pillow.fromarray((values * (255 if high <= 1 else 1)).round().astype("uint8"))


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return "not a known image format" if text.startswith("cannot identify") else text
