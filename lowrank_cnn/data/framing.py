"""From an encoded image to the window that a network sees: decode, scale by the shorter side, crop, mirror.

Two ways give the same window to within one level of 255 (`benchmarks/input_pipeline.py` measures both). Pillow
scales only the part that the window shows. Torch scales the whole image, which its vectorised loops on x86 do in
less time; there, `simplejpeg` decodes JPEGs where it is installed, faster than Pillow and to the same pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.decode import crop_at, decode_image, fit, resize_shorter, resize_window
from lowrank_cnn.errors import require

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


Framer = Callable[[bytes, Framing, int, list[float] | None], bytes]


def frame_by_pillow(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    """The window of an encoded image as bytes [h, w, C]."""
    return framing(decode_image(data, channels=channels, at_least=framing.at_least), draws).tobytes()


def frame_by_torch(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    """The same, scaled by torch; what is not plain colour scaling is left to Pillow."""
    if framing.size or framing.pad or not framing.resize or channels != 3:
        return frame_by_pillow(data, framing, channels, draws)
    pixels = _decode(data, framing.at_least)
    height, width = scaled(pixels.shape[0], pixels.shape[1], framing.resize)
    whole = pixels.permute(2, 0, 1)[None]
    if (height, width) != tuple(pixels.shape[:2]):
        whole = functional.interpolate(whole, (height, width), mode="bilinear", antialias=True)
    top, left = framing.corner(height, width, draws)
    window = whole[0, :, top : top + framing.window[0], left : left + framing.window[1]]
    window = window.flip(2) if framing.mirrored(draws) else window
    return window.permute(1, 2, 0).contiguous().numpy().tobytes()


@cache
def framer() -> Framer:
    """The faster way on this processor."""
    vectorised = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return frame_by_torch if vectorised else frame_by_pillow


def _decode(data: bytes, at_least: int) -> Tensor:
    """Pixels [H, W, 3]; large JPEGs come from Pillow, which decodes them at a reduced scale."""
    if data.startswith(_JPEG) and (jpeg := _simplejpeg()):
        try:
            height, width, space, _ = jpeg.decode_jpeg_header(data)
            if min(height, width) < 2 * at_least and space not in ("CMYK", "YCCK"):
                return torch.from_numpy(jpeg.decode_jpeg(data, "RGB"))
        except ValueError:
            pass  # Pillow decodes what is only unusual, and names what is wrong with the rest
    image = decode_image(data, channels=3, at_least=at_least)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _offset(margin: int, draw: float | None) -> int:
    return margin // 2 if draw is None else int(draw * (margin + 1))
