"""From an encoded image to the window that a network sees: decode, scale by the shorter side, crop, mirror.

The ways give the same window to within one level of 255 (`benchmarks/input_pipeline.py` measures them). Pillow
scales only the part that the window shows. Torch scales the whole image, which its vectorised loops on x86 do in
less time. `simplejpeg`, where it is installed, decodes to the same pixels as Pillow, and faster, since its pixels
lie as they are needed: it serves torch, and photographs stored at the right scale, of which a window is cut out.
Pillow would first have to copy its pixels, which costs what they gain.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.images.decode import crop_at, decode_image, fit, resize_shorter, resize_window
from lowrank_cnn.system.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

_JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Framing:
    """How an image becomes a window: brought to a size where there is one, scaled, then cropped."""

    window: tuple[int, int]
    size: tuple[int, int] | None
    resize: int | None
    pad: int
    mirror: bool
    fill: tuple[int, ...]

    @property
    def at_least(self) -> int:
        """How far a decoder may scale the image down."""
        return max(self.resize or 0, *(self.size or (0, 0)))

    def __call__(self, image: Image, draws: list[float] | None) -> Image:
        """The centre window, or with three numbers of 0 to 1 a random one that may be mirrored."""
        if self.size:
            image = fit(image, *self.size)
        top, left = self.corner(*scaled(image.height, image.width, self.resize), draws)
        height, width = self.window
        if self.resize and not self.pad:
            image = resize_window(image, self.resize, top, left, height, width)
        else:
            image = resize_shorter(image, self.resize) if self.resize else image
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

    def order(self, draws: list[float] | None) -> str:
        """The order of colours in which `_cut_out` wants pixels."""
        return "BGR" if self.mirrored(draws) else "RGB"


Framer = Callable[[bytes, Framing, int, list[float] | None], bytes]


def frame_by_pillow(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    """The window of an encoded image as bytes [h, w, C]."""
    return framing(decode_image(data, channels=channels, at_least=framing.at_least), draws).tobytes()


def frame_by_torch(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    """The same, scaled by torch; what is not plain colour scaling is left to Pillow."""
    if framing.size or framing.pad or not framing.resize or channels != 3:
        return frame_by_pillow(data, framing, channels, draws)
    pixels = _decode(data, framing, draws)
    size = scaled(pixels.shape[0], pixels.shape[1], framing.resize)
    if size != pixels.shape[:2]:
        whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        whole = functional.interpolate(whole, size, mode="bilinear", antialias=True)
        pixels = whole[0].permute(1, 2, 0).contiguous().numpy()
    return _cut_out(pixels, framing, draws)


def frame_by_simplejpeg(
    data: bytes, framing: Framing, channels: int, draws: list[float] | None, *, otherwise: Framer
) -> bytes:
    """The same, cut out of a colour JPEG that has the right scale already; the rest is framed otherwise."""
    if channels == 3 and not framing.pad and (size := _plain_size(data)):
        right = framing.size in (None, size) and scaled(*size, framing.resize) == size
        if right and (pixels := _decode_plain(data, framing.order(draws))) is not None:
            return _cut_out(pixels, framing, draws)
    return otherwise(data, framing, channels, draws)


@cache
def framer() -> Framer:
    """The fastest way on this machine."""
    vectorised = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    scaling = frame_by_torch if vectorised else frame_by_pillow
    return partial(frame_by_simplejpeg, otherwise=scaling) if _simplejpeg() else scaling


def _cut_out(pixels: Any, framing: Framing, draws: list[float] | None) -> bytes:
    """The window of pixels [H, W, 3]; to be mirrored they come as BGR, so that all bytes of a row turn round."""
    height, width, _ = pixels.shape
    top, left = framing.corner(height, width, draws)
    rows = pixels.reshape(height, 3 * width)
    window = rows[top : top + framing.window[0], 3 * left : 3 * (left + framing.window[1])]
    return (window[:, ::-1] if framing.mirrored(draws) else window).tobytes()


def _decode(data: bytes, framing: Framing, draws: list[float] | None) -> Any:
    """Pixels [H, W, 3] for `_cut_out`; large JPEGs come from Pillow, which decodes them at a reduced scale."""
    size, order = _plain_size(data), framing.order(draws)
    if size and min(size) < 2 * framing.at_least and (pixels := _decode_plain(data, order)) is not None:
        return pixels
    numpy = require("numpy", extra="data", purpose="decoding images")
    image = decode_image(data, channels=3, at_least=framing.at_least)
    flat = numpy.frombuffer(bytearray(image.tobytes("raw", order)), numpy.uint8)
    return flat.reshape(image.height, image.width, 3)


def _plain_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that simplejpeg can decode; None for other files, and where it is missing."""
    if data.startswith(_JPEG) and (jpeg := _simplejpeg()):
        try:
            height, width, space, _ = jpeg.decode_jpeg_header(data)
            return None if space in ("CMYK", "YCCK") else (height, width)
        except ValueError:
            pass
    return None


def _decode_plain(data: bytes, order: str) -> Any | None:
    """Pixels [H, W, 3] by simplejpeg; None where Pillow has to say what is wrong, or decodes what is only odd."""
    jpeg = _simplejpeg()
    assert jpeg is not None
    try:
        return jpeg.decode_jpeg(data, order)
    except ValueError:
        return None


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _offset(margin: int, draw: float | None) -> int:
    return margin // 2 if draw is None else int(draw * (margin + 1))
