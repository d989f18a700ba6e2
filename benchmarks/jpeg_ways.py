"""JPEGs of ILSVRC's size, and the ways to decode, scale and crop them that `input_pipeline.py` measures."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.data import open_data
from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.decode import Framing, crop_at, decode_image, scale_shorter

WIDTH, HEIGHT, TILE, QUALITY = 500, 375, 64, 90
FRAMING = Framing((224, 224), None, 256, 0, True, (0, 0, 0))
DRAWS = [0.3, 0.6, 0.2]
LIBRARIES = ("pillow", "simplejpeg", "PyTurboJPEG", "opencv-python-headless", "torchvision")

Decoder = Callable[[bytes], Any]


def photographs(folder: Path, n: int) -> dict[str, list[bytes]]:
    """Three kinds of JPEGs made from the images of a set of small ones."""
    from PIL import Image

    images = open_data(folder).test.subset(torch.arange(48 * n))
    small = (Image.fromarray(pixels.permute(1, 2, 0).numpy()) for part in images.pixels() for pixels in part)
    tiles = [next(small) for _ in range(48 * n)]
    mosaics = []
    for number in range(n):
        canvas = Image.new("RGB", (8 * TILE, 6 * TILE))
        for place in range(48):
            canvas.paste(tiles[48 * number + place], (place % 8 * TILE, place // 8 * TILE))
        mosaics.append(canvas.crop((0, 0, WIDTH, HEIGHT)))
    upscaled = [tile.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for tile in tiles[:n]]
    return {
        "upscaled": [jpeg(image) for image in upscaled],
        "mosaic": [jpeg(image) for image in mosaics],
        "shrunk": [jpeg(scale_shorter(image, 256)) for image in mosaics],
    }


def jpeg(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def decoders() -> Iterator[tuple[str, Decoder]]:
    """Pillow, and decoders of other libraries that can be imported."""
    yield "Pillow", lambda data: decode_image(data, channels=3)
    if jpeg_ := found("simplejpeg"):
        yield "simplejpeg", lambda data: jpeg_.decode_jpeg(data, "RGB")
        yield "simplejpeg, fast DCT", lambda data: jpeg_.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
    if (turbo := found("turbojpeg")) and (reader := attempt(turbo.TurboJPEG)):
        yield "PyTurboJPEG", lambda data: reader.decode(data, pixel_format=turbo.TJPF_RGB)
    if cv2 := found("cv2"):
        cv2.setNumThreads(1)
        yield "OpenCV", lambda data: cv2.imdecode(as_array(data), cv2.IMREAD_COLOR)
    if vision := found("torchvision.io"):
        yield "torchvision", lambda data: vision.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def ways() -> Iterator[tuple[str, Decoder]]:
    """Decode, scale to a shorter side of 256, crop 224, mirror."""
    yield "Pillow, whole image scaled", whole_then_crop
    yield "Pillow, window scaled", window_by_pillow
    if jpeg_ := found("simplejpeg"):
        yield "simplejpeg, window scaled by Pillow", partial(window_of_array, jpeg_)
    yield "torch, whole image scaled", whole_by_torch
    if cv2 := found("cv2"):
        yield "OpenCV, not antialiased", partial(scaled_by_opencv, cv2)
    yield "chosen here", window_by_pillow


def whole_then_crop(data: bytes) -> bytes:
    """Scale every pixel, then crop: the way before Pillow scaled only the crop."""
    image = scale_shorter(decode_image(data, channels=3, at_least=256), 256)
    top, left = FRAMING.corner(image.height, image.width, DRAWS)
    return crop_at(image, top, left, 224, 224, fill=(0, 0, 0)).tobytes()


def window_by_pillow(data: bytes) -> bytes:
    return FRAMING(decode_image(data, channels=3, at_least=256), DRAWS).tobytes()


def window_of_array(jpeg_: Any, data: bytes) -> bytes:
    """Pillow stores four bytes per pixel, so it has to copy its input."""
    from PIL import Image

    pixels = jpeg_.decode_jpeg(data, "RGB")
    size = pixels.shape[1], pixels.shape[0]
    return FRAMING(Image.frombuffer("RGB", size, pixels, "raw", "RGB", 0, 1), DRAWS).tobytes()


def whole_by_torch(data: bytes) -> bytes:
    """Every pixel scaled by torch, which has vectorised loops for it on x86."""
    image = decode_image(data, channels=3, at_least=256)
    pixels = as_array(bytearray(image.tobytes())).reshape(image.height, image.width, 3)
    whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    size = scaled(image.height, image.width, 256)
    whole = torch.nn.functional.interpolate(whole, size, mode="bilinear", antialias=True)[0]
    top, left = FRAMING.corner(*size, DRAWS)
    return whole[:, top : top + 224, left : left + 224].flip(2).permute(1, 2, 0).contiguous().numpy().tobytes()


def scaled_by_opencv(cv2: Any, data: bytes) -> bytes:
    whole = cv2.resize(cv2.imdecode(as_array(data), cv2.IMREAD_COLOR), (341, 256), interpolation=cv2.INTER_LINEAR)
    return whole[16:240, 58:282].tobytes()


def as_array(data: bytes | bytearray) -> Any:
    import numpy as np

    return np.frombuffer(data, np.uint8)


def found(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):  # a build for another torch fails with any error
        return None


def attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (OSError, RuntimeError):  # the C library behind it is missing
        return None


def versions() -> dict[str, str]:
    """The libraries that are installed."""
    known = {}
    for library in LIBRARIES:
        try:
            known[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
