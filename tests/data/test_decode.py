"""From image files to pixels: decoding, cropping, and small pictures for records."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.decode import (
    SIDE,
    BadImageError,
    Framing,
    decode_image,
    image_header,
    thumbnail,
)
from lowrank_cnn.report.records import LARGEST_THUMBNAIL


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def ramp(mode: str) -> Image.Image:
    """16x16, from black at the left to white at the right."""
    grey = np.tile(np.arange(16, dtype=np.uint8) * 17, (16, 1))
    return Image.fromarray(grey).convert(mode)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_of_png_becomes_grey_or_rgb(mode: str, channels: int) -> None:
    image = decode_image(encoded(ramp(mode)), channels=channels)
    assert image.mode == {1: "L", 3: "RGB"}[channels]
    values = np.asarray(image).reshape(16, 16, -1)
    assert values[:, 0].max() <= 10
    assert values[:, -1].min() >= 245
    palette = ramp("P")
    palette.info["transparency"] = bytes(range(256))
    assert decode_image(encoded(palette), channels=3).mode == "RGB"


def test_cmyk_jpeg_becomes_rgb_of_the_same_colours() -> None:
    red = Image.new("RGB", (16, 16), (250, 10, 20))
    image = decode_image(encoded(red.convert("CMYK"), "JPEG", quality=100), channels=3)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - [250, 10, 20]).max() <= 4


def test_deep_grey_images_keep_their_range() -> None:
    deep = Image.fromarray((np.tile(np.arange(16), (16, 1)) * 4369).astype(np.uint16))
    assert deep.mode.startswith("I;16")
    for format in ("PNG", "TIFF"):
        image = decode_image(encoded(deep, format), channels=3)
        values = np.asarray(image)[0, :, 0].astype(int)
        assert np.abs(values - np.arange(16) * 17).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_truncated_files_are_bad_images_not_crashes(photo, format: str) -> None:
    whole = photo(0, size=(40, 40), format=format)
    decode_image(whole, channels=3)
    refused = 0
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        try:
            assert decode_image(whole[:length], channels=3).size == (40, 40)
        except BadImageError:
            refused += 1
    assert refused >= 55  # some formats do not miss their last bytes


def test_damaged_bytes_are_bad_images_not_crashes(photo) -> None:
    whole = photo(0, size=(40, 40))
    reasons = []
    for seed in range(50):
        noise = np.random.default_rng(seed)
        damaged = bytearray(whole)
        for place in noise.integers(0, len(whole), 8):
            damaged[place] = noise.integers(0, 256)
        try:
            decode_image(bytes(damaged), channels=3)
        except BadImageError as error:
            reasons.append(str(error))
    assert len(reasons) > 25
    assert all(reasons)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_by_its_header(photo, monkeypatch: pytest.MonkeyPatch) -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(BadImageError, match="3600000000"):
        decode_image(png + struct.pack(">I", 0) + b"IDAT", channels=1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 80)
    with pytest.raises(BadImageError, match="10x12 pixels are too many"):
        decode_image(photo(0), channels=3)


@pytest.mark.parametrize("data", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_other_files_are_not_images(data: bytes) -> None:
    with pytest.raises(BadImageError, match="not a known image format"):
        decode_image(data, channels=3)


def test_a_jpeg_may_come_smaller_but_not_too_small(photo) -> None:
    data = photo(0, size=(160, 240), format="JPEG")
    assert decode_image(data, channels=3, at_least=40).size == (60, 40)
    assert decode_image(data, channels=3, at_least=100).size == (240, 160)
    assert decode_image(data, channels=3).size == (240, 160)


def test_floats_of_no_known_range_are_bad_images() -> None:
    with pytest.raises(BadImageError, match=r"float pixels, .* 8 or 16 bits"):
        decode_image(encoded(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"), channels=1)


def turned(how: int, format: str = "JPEG") -> bytes:
    """A photograph of 40x20 pixels, white in its top half, as a camera held in this way stores it."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:10] = 255
    upright = Image.fromarray(pixels)
    undo = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    stored = upright if undo[how] is None else upright.transpose(undo[how])
    exif = Image.Exif()
    exif[0x0112] = how
    return encoded(stored, format, exif=exif)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("how", [1, 3, 6, 8])
def test_a_photograph_is_upright_however_the_camera_was_held(how: int, format: str) -> None:
    data = turned(how, format)
    assert image_header(data) == ((20, 40), False)
    values = np.asarray(decode_image(data, channels=1)).astype(int)
    assert values.shape == (20, 40)
    assert values[:8].min() > 200
    assert values[12:].max() < 50


def test_a_damaged_exif_tag_leaves_the_image_as_it_is() -> None:
    for exif in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        assert decode_image(encoded(ramp("RGB"), "JPEG", exif=exif), channels=3).size == (16, 16)


def frame_image(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    return framing(decode_image(data, channels=channels, at_least=framing.at_least), draws).tobytes()


FRAMING = Framing((14, 14), None, 16, 0, True, (0, 0, 0))


def smooth(height: int, width: int, format: str = "PNG", mode: str = "RGB") -> bytes:
    """A picture with soft edges, as photographs have."""
    small = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return encoded(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode), format)


def plain(data: bytes, framing: Framing, draws: list[float] | None) -> np.ndarray:
    """Scale everything, then crop, then mirror."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    height, width = scaled(image.height, image.width, framing.resize)
    whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    top, left = framing.corner(height, width, draws)
    window = whole[top : top + framing.window[0], left : left + framing.window[1]]
    return window[:, ::-1] if draws and framing.mirror and draws[2] < 0.5 else window


@settings(max_examples=40)
@given(
    size=st.tuples(st.integers(14, 60), st.integers(14, 60)),
    draws=st.none() | st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3),
)
def test_a_window_is_that_of_the_whole_scaled_image(size: tuple[int, int], draws: list[float] | None) -> None:
    data = smooth(*size)
    window = np.frombuffer(frame_image(data, FRAMING, 3, draws), np.uint8).reshape(14, 14, 3)
    difference = np.abs(window.astype(int) - plain(data, FRAMING, draws))
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.5


@pytest.mark.parametrize(
    ("format", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "L")]
)
def test_every_kind_of_image_is_framed_in_grey_and_colour(format: str, mode: str) -> None:
    data = smooth(40, 31, format, mode)
    grey, colour = (np.frombuffer(frame_image(data, FRAMING, channels, None), np.uint8) for channels in (1, 3))
    assert len(grey) == 14 * 14
    expected = plain(data, FRAMING, None)
    assert np.abs(colour.reshape(14, 14, 3).astype(int) - expected).max() <= 1
    assert np.abs(grey.reshape(14, 14) - expected @ [0.299, 0.587, 0.114]).max() <= 2
    large = smooth(160, 200, format, mode)  # a JPEG comes at a reduced scale
    window = np.frombuffer(frame_image(large, FRAMING, 3, None), np.uint8).reshape(14, 14, 3)
    assert np.abs(window.astype(int) - plain(large, FRAMING, None)).mean() < 2


def test_padding_has_the_colour_of_the_fill(photo) -> None:
    padded = Framing((14, 14), (16, 16), 16, 2, True, (1, 2, 3))
    window = np.frombuffer(frame_image(photo(0), padded, 3, [0.0, 0.0, 0.9]), np.uint8).reshape(14, 14, 3)
    assert (window[:2] == [1, 2, 3]).all()
    assert not (window[2:, 2:] == [1, 2, 3]).all()


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_thumbnail_is_the_image_made_smaller(channels: int, mode: str) -> None:
    pixels = torch.zeros(channels, 200, 400, dtype=torch.uint8)
    pixels[:, :, 200:] = 255
    uri = thumbnail(pixels)
    assert uri is not None
    image = opened(uri)
    assert (image.mode, image.size) == (mode, (SIDE, SIDE // 2))
    grey = image.convert("L")
    assert grey.getpixel((5, 20)) < 20  # pyright: ignore[reportOperatorIssue]
    assert grey.getpixel((SIDE - 5, 20)) > 235  # pyright: ignore[reportOperatorIssue]


def test_small_images_keep_their_size_and_noise_fits_a_record() -> None:
    draw = torch.Generator().manual_seed(0)
    uri = thumbnail(torch.randint(0, 256, (3, 32, 24), dtype=torch.uint8, generator=draw))
    assert uri is not None
    assert opened(uri).size == (24, 32)
    noise = thumbnail(torch.randint(0, 256, (3, 500, 500), dtype=torch.uint8, generator=draw))
    assert noise is not None
    assert len(noise) <= LARGEST_THUMBNAIL
    assert thumbnail(None) is thumbnail(torch.zeros(5, 8, 8, dtype=torch.uint8)) is None
