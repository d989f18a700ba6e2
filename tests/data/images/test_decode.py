from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from lowrank_cnn.data.decode import (
    BadImageError,
    ImageHeader,
    cover_and_crop,
    crop_at,
    decode_image,
    image_header,
    scale_shorter,
    stack,
)


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


def test_palette_with_transparent_bytes() -> None:
    image = ramp("P")
    image.info["transparency"] = bytes(range(256))
    assert decode_image(encoded(image), channels=3).mode == "RGB"


def test_what_a_header_tells(photo: Callable[..., bytes]) -> None:
    assert image_header(photo(0, size=(12, 10))) == ImageHeader(12, 10, grey=False)
    assert image_header(photo(0, size=(5, 7), mode="L", format="JPEG")) == ImageHeader(5, 7, grey=True)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_truncated_files_are_bad_images_not_crashes(photo: Callable[..., bytes], format: str) -> None:
    whole = photo(0, size=(40, 40), format=format)
    decode_image(whole, channels=3)
    refused = 0
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        try:
            assert decode_image(whole[:length], channels=3).size == (40, 40)
        except BadImageError:
            refused += 1
    assert refused >= 55  # some formats do not miss their last bytes


def test_damaged_bytes_are_bad_images_not_crashes(photo: Callable[..., bytes]) -> None:
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


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(BadImageError, match="3600000000"):
        decode_image(png + struct.pack(">I", 0) + b"IDAT", channels=1)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_of_too_many_pixels_are_refused(
    photo: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 80)
    with pytest.raises(BadImageError, match="10x12 pixels are too many"):
        decode_image(photo(0), channels=3)


@pytest.mark.parametrize("data", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_other_files_are_not_images(data: bytes) -> None:
    with pytest.raises(BadImageError, match="not a known image format"):
        decode_image(data, channels=3)


def test_resizing_and_fitting() -> None:
    image = Image.new("RGB", (50, 30), (9, 8, 7))
    assert scale_shorter(image, 15).size == (25, 15)
    assert scale_shorter(image, 30) is image
    assert cover_and_crop(image, 20, 20).size == (20, 20)
    assert cover_and_crop(image, 30, 50) is image
    assert (np.asarray(cover_and_crop(image, 64, 10)) == [9, 8, 7]).all()


def test_fitting_keeps_the_centre() -> None:
    image = Image.new("L", (30, 10))
    image.paste(255, (10, 0, 20, 10))
    assert np.asarray(cover_and_crop(image, 10, 10)).min() == 255


def test_windows_beyond_the_image_are_filled() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    window = np.asarray(crop_at(image, -1, 2, 4, 4, fill=(7, 8, 9)))
    assert (window[0] == [7, 8, 9]).all()
    assert (window[1:, :2] == [1, 2, 3]).all()
    assert (window[:, 2:] == [7, 8, 9]).all()
    assert crop_at(Image.new("L", (4, 4)), -1, 0, 4, 4, fill=(7,)).getpixel((0, 0)) == 7


def test_a_jpeg_may_come_smaller_but_not_too_small(photo: Callable[..., bytes]) -> None:
    data = photo(0, size=(160, 240), format="JPEG")
    assert decode_image(data, channels=3, at_least=40).size == (60, 40)
    assert decode_image(data, channels=3, at_least=100).size == (240, 160)
    assert decode_image(data, channels=3).size == (240, 160)


def test_pixels_are_stacked_by_rows() -> None:
    stacked = stack([bytes(range(6)), bytes(range(6, 12))], 1, 2, 3)
    assert stacked.tolist() == [[[[0, 1, 2], [3, 4, 5]]], [[[6, 7, 8], [9, 10, 11]]]]
    assert stack([], 4, 5, 3).shape == (0, 4, 5, 3)


@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_tiffs_of_floats_are_no_black_images(scale: float) -> None:
    values = np.tile(np.arange(16, dtype=np.float32) * 17 * scale, (16, 1))
    image = decode_image(encoded(Image.fromarray(values), "TIFF"), channels=3)
    assert np.array_equal(np.asarray(image)[0, :, 0], np.arange(16) * 17)


@pytest.mark.parametrize("value", [-1.0, 256.0, float("nan"), float("inf")])
def test_floats_of_no_known_range_are_bad_images(value: float) -> None:
    values = np.zeros((8, 8), np.float32)
    values[4, 4] = value
    with pytest.raises(BadImageError, match=r"float pixels from .* 8 or 16 bits"):
        decode_image(encoded(Image.fromarray(values), "TIFF"), channels=1)


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
    assert image_header(data) == ImageHeader(20, 40, grey=False)
    values = np.asarray(decode_image(data, channels=1)).astype(int)
    assert values.shape == (20, 40)
    assert values[:8].min() > 200
    assert values[12:].max() < 50


def test_a_damaged_exif_tag_leaves_the_image_as_it_is() -> None:
    for exif in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        assert decode_image(encoded(ramp("RGB"), "JPEG", exif=exif), channels=3).size == (16, 16)
