"""Decode photographs on the GPU that trains on them, for machines with few cores beside it.

Workers read the bytes and draw the same crops as when they decode. nvJPEG, through torchvision, decodes a batch,
on the decoding engines of the GPU if it has any. Its pixels differ slightly from libjpeg's: it repeats colours
over the pixels that share them, where libjpeg interpolates, and it never decodes at a reduced scale. It therefore
decodes only if asked to. A worker frames images that are not plain colour JPEGs; this process frames what nvJPEG
refuses.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError, first_line, require
from lowrank_cnn.data.augment import send_to_device
from lowrank_cnn.data.decode import LARGEST, Framing, ScaledCrop, stack
from lowrank_cnn.data.workers import BatchPart, EpochParts, Found

DECODED_AT_ONCE, SCALED_AT_ONCE = LARGEST, 2**24
"""Pixels held whole at a time, and those held as floats: what bounds the memory that large photographs take."""

Jpeg = tuple[Tensor, ScaledCrop]
Decoder = Callable[[list[Tensor]], list[Tensor]]
"""From the bytes of JPEGs to uint8 [3, H, W] on the device; a RuntimeError where any is refused."""


def find_decoder(device: torch.device) -> Decoder:
    """torchvision's nvJPEG, once it has shown that it works here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise LowRankError(f"decode='gpu' (--decode gpu) needs a CUDA device, and this run is on {device}.")
    try:
        vision: Any = require("torchvision.io", extra="zoo", purpose="decode='gpu' (--decode gpu)")
        pillow = require("PIL.Image", extra="data", purpose="decoding images")
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        decode = partial(_by_nvjpeg, vision, device)
        pillow.new("RGB", (64, 64)).save(probe := io.BytesIO(), "JPEG")
        decode([torch.frombuffer(bytearray(probe.getvalue()), dtype=torch.uint8)])
    except (RuntimeError, OSError, AttributeError) as error:  # a build for another torch fails in various ways
        raise LowRankError(
            f"decode='gpu' (--decode gpu) does not work with this torchvision: {first_line(error)}"
        ) from error
    return decode


def _by_nvjpeg(vision: Any, device: torch.device, jpegs: list[Tensor]) -> list[Tensor]:
    # It writes in a stream of its own to memory that this stream may still be reading for the batch before.
    torch.cuda.current_stream(device).synchronize()
    return vision.decode_jpeg(jpegs, mode=vision.ImageReadMode.RGB, device=device)


def check_framing(framing: Framing, channels: int, *, train: bool) -> None:
    """Refuse to decode on a GPU what the workers would have to decode after all."""
    if channels != 3 or (train and framing.pad):
        raise LowRankError(
            "decode='gpu' (--decode gpu) is for photographs in colour that are not padded: set pad to 0 and read "
            "the images in colour, or decode them on the CPU."
        )


def decode_parts(
    parts: EpochParts, batch: int, read: Sequence[BatchPart], decode: Decoder, device: torch.device
) -> BatchPart:
    """The parts of a batch as one, its images on the device: decoded, scaled, cut out and mirrored there."""
    size = parts.framing.window

    def on_device(pixels: Tensor) -> Tensor:
        return pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)

    decoded = iter(decode_windows([jpeg for part in read for jpeg in part.jpegs()], size, decode))
    images: list[Tensor] = []
    rows: list[int] = []
    found: Found = [problem for part in read for problem in part.found]
    for part in read:
        framed = iter(on_device(part.images))
        for number, crop, row in zip(part.numbers, part.crops, part.rows, strict=True):
            pixels, place = next(decoded if crop else framed), row
            if pixels is None:
                if (again := parts.framed(batch, number, found)) is None:
                    continue
                pixels, place = on_device(stack([again.data], *size, parts.channels))[0], again.row
            images.append(pixels)
            rows.append(place)
    whole = torch.stack(images).permute(0, 2, 3, 1) if images else stack([], *size, parts.channels)
    return BatchPart(whole, rows, found, {})


@torch.no_grad()
def decode_windows(jpegs: list[Jpeg], size: tuple[int, int], decode: Decoder) -> list[Tensor | None]:
    """The window [3, h, w] of every JPEG; None for those that are refused."""
    return [window for some in _at_once(jpegs) for window in _cut_out(some, size, decode)]


def _at_once(jpegs: list[Jpeg]) -> Iterator[list[Jpeg]]:
    """Runs of JPEGs, each small enough to be held decoded."""
    run: list[Jpeg] = []
    held = 0
    for jpeg in jpegs:
        held += jpeg[1].pixels
        if run and held > DECODED_AT_ONCE:
            yield run
            run, held = [], jpeg[1].pixels
        run.append(jpeg)
    yield run


def _cut_out(jpegs: list[Jpeg], size: tuple[int, int], decode: Decoder) -> list[Tensor | None]:
    windows = [window for _, window in jpegs]
    decoded = zip(decode_each([data for data, _ in jpegs], decode), windows, strict=True)
    images = {
        index: image
        for index, (image, window) in enumerate(decoded)
        if image is not None and image.shape == (3, *window.whole)
    }
    if not images:
        return [None] * len(jpegs)
    scale(images, windows)
    cut = []
    for index, image in images.items():
        top, left = windows[index].corner
        cut.append(image[:, top : top + size[0], left : left + size[1]])
    stacked = torch.stack(cut)
    mirrored = send_to_device(torch.tensor([windows[index].mirrored for index in images]), stacked.device)
    rows = dict(zip(images, torch.where(mirrored[:, None, None, None], stacked.flip(3), stacked), strict=True))
    return [rows.get(index) for index in range(len(jpegs))]


def scale(images: dict[int, Tensor], windows: Sequence[ScaledCrop]) -> None:
    """Bring images to their scale, in place: those of one size together, as photographs of a set often are."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in images:
        if windows[index].scaled != windows[index].whole:
            alike[windows[index].whole].append(index)
    for members in alike.values():
        at_once = max(1, SCALED_AT_ONCE // windows[members[0]].pixels)
        for first in range(0, len(members), at_once):
            some = members[first : first + at_once]
            pixels, to = torch.stack([images[index] for index in some]).float(), windows[some[0]].scaled
            pixels = functional.interpolate(pixels, to, mode="bilinear", antialias=True)
            images.update(zip(some, pixels.round_().to(torch.uint8), strict=True))


def decode_each(jpegs: list[Tensor], decode: Decoder) -> list[Tensor | None]:
    """The pixels of every JPEG, None for those that are refused: one of them fails a call for all."""
    if not jpegs:
        return []
    try:
        return list(decode(jpegs))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        if len(jpegs) == 1:
            return [None]
        middle = len(jpegs) // 2
        return decode_each(jpegs[:middle], decode) + decode_each(jpegs[middle:], decode)
