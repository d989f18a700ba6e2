from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowrank_cnn.data import decode as module
from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.decode import BadImageError, Framing, ScaledCrop, frame_image, plain_jpeg_size

FRAMING = Framing((14, 14), None, 16, 0, True, (0, 0, 0))


def smooth(height: int, width: int, format: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    """A picture with soft edges, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


def plain(data: bytes, framing: Framing, draws: list[float] | None) -> np.ndarray:
    """Scale everything, then crop, then mirror."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    height, width = scaled(image.height, image.width, framing.resize)
    whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    top, left = framing.corner(height, width, draws)
    window = whole[top : top + framing.window[0], left : left + framing.window[1]]
    return window[:, ::-1] if framing.mirrored(draws) else window


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


def test_an_image_of_the_right_scale_is_only_cropped() -> None:
    data = smooth(16, 20)
    window = np.frombuffer(frame_image(data, FRAMING, 3, [0.99, 0.0, 0.9]), np.uint8).reshape(14, 14, 3)
    assert (window == np.asarray(Image.open(io.BytesIO(data)))[2:16, :14]).all()


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


def test_what_is_no_image_is_refused_with_its_reason() -> None:
    with pytest.raises(BadImageError, match="not a known image format"):
        frame_image(b"junk", FRAMING, 3, None)
    with pytest.raises(BadImageError, match="truncated"):
        frame_image(smooth(40, 40, "JPEG")[:-60], FRAMING, 3, None)


def test_padding_has_the_colour_of_the_fill(photo: Callable[..., bytes]) -> None:
    padded = Framing((14, 14), (16, 16), 16, 2, True, (1, 2, 3))
    window = np.frombuffer(frame_image(photo(0), padded, 3, [0.0, 0.0, 0.9]), np.uint8).reshape(14, 14, 3)
    assert (window[:2] == [1, 2, 3]).all()
    assert not (window[2:, 2:] == [1, 2, 3]).all()


def test_large_jpegs_come_at_a_reduced_scale() -> None:
    data = smooth(160, 200, "JPEG")
    window = np.frombuffer(frame_image(data, FRAMING, 3, None), np.uint8).reshape(14, 14, 3)
    assert np.abs(window.astype(int) - plain(data, FRAMING, None)).mean() < 2


class StandIn:
    """What simplejpeg does, by Pillow, so that its place in the pipeline is tested where it is missing too."""

    def __init__(self) -> None:
        self.decoded: list[str] = []

    def decode_jpeg_header(self, data: bytes) -> tuple[int, int, str, str]:
        image = self._open(data)
        return image.height, image.width, {"L": "Gray", "CMYK": "CMYK"}.get(image.mode, "YCbCr"), "420"

    def decode_jpeg(self, data: bytes, order: str) -> np.ndarray:
        image = self._open(data)
        try:
            pixels = np.asarray(image.convert("RGB"))
        except OSError as error:
            raise ValueError(error) from error
        self.decoded.append(order)
        return np.ascontiguousarray(pixels[..., ::-1] if order == "BGR" else pixels)

    def _open(self, data: bytes) -> Image.Image:
        try:
            return Image.open(io.BytesIO(data))
        except OSError as error:
            raise ValueError(error) from error


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    jpeg = StandIn()
    monkeypatch.setattr(module, "_simplejpeg", lambda: jpeg)
    return jpeg


def framed_by_pillow(data: bytes, framing: Framing, channels: int, draws: list[float] | None) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_simplejpeg", lambda: None)
        return frame_image(data, framing, channels, draws)


@pytest.mark.parametrize("draws", [None, [0.3, 0.9, 0.9], [0.3, 0.9, 0.2]])
@pytest.mark.parametrize("size", [(16, 20), (20, 16), (16, 16)])
def test_a_jpeg_of_the_right_scale_is_cut_out(
    stand_in: StandIn, size: tuple[int, int], draws: list[float] | None
) -> None:
    for mode in ("RGB", "L"):
        data = smooth(*size, "JPEG", mode)
        assert frame_image(data, FRAMING, 3, draws) == framed_by_pillow(data, FRAMING, 3, draws)
    assert stand_in.decoded == ["BGR" if draws and draws[2] < 0.5 else "RGB"] * 2


def test_what_simplejpeg_cannot_do_is_framed_by_pillow(stand_in: StandIn) -> None:
    right = Framing((14, 14), (16, 20), None, 0, False, (0, 0, 0))
    padded = Framing((14, 14), None, 16, 2, False, (0, 0, 0))
    for data, framing, channels in (
        (smooth(16, 20, "JPEG", "CMYK"), FRAMING, 3),
        (smooth(16, 20, "PNG"), FRAMING, 3),
        (smooth(17, 20, "JPEG"), FRAMING, 3),
        (smooth(16, 20, "JPEG"), FRAMING, 1),
        (smooth(16, 20, "JPEG"), padded, 3),
        (smooth(16, 21, "JPEG"), right, 3),
    ):
        assert frame_image(data, framing, channels, None) == framed_by_pillow(data, framing, channels, None)
    assert stand_in.decoded == []
    assert frame_image(smooth(16, 20, "JPEG"), right, 3, None)
    assert stand_in.decoded == ["RGB"]


def test_pillow_says_what_is_wrong_with_a_jpeg(stand_in: StandIn) -> None:
    whole = smooth(16, 20, "JPEG")
    for data, reason in ((whole[:-60], "truncated"), (whole[:3], "not a known image format")):
        with pytest.raises(BadImageError, match=reason):
            frame_image(data, FRAMING, 3, None)
    assert stand_in.decoded == []


def test_simplejpeg_gives_the_pixels_of_pillow() -> None:
    pytest.importorskip("simplejpeg")
    for mode, size in (
        ("RGB", (30, 41)),
        ("L", (16, 41)),
        ("CMYK", (16, 41)),
        ("RGB", (90, 120)),
        ("RGB", (16, 20)),
    ):
        data = smooth(*size, "JPEG", mode)
        for draws in (None, [0.3, 0.9, 0.2]):
            assert frame_image(data, FRAMING, 3, draws) == framed_by_pillow(data, FRAMING, 3, draws)
    with pytest.raises(BadImageError):
        frame_image(smooth(16, 20, "JPEG")[:-60], FRAMING, 3, None)


def encoded(height: int = 20, width: int = 30, mode: str = "RGB", format: str = "JPEG", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, format, **options)
    return out.getvalue()


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """The JPEG with one more segment in front."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + data[2:]


SIDEWAYS = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


def frame_at(data: bytes) -> int:
    """Where the body of the baseline frame begins."""
    return data.index(b"\xff\xc0") + 4


def changed(data: bytes, at: int, *values: int) -> bytes:
    return data[:at] + bytes(values) + data[at + len(values) :]


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_plain_photograph_tells_its_size(subsampling: str) -> None:
    for height, width in ((20, 30), (300, 17), (1, 1)):
        assert plain_jpeg_size(encoded(height, width, subsampling=subsampling)) == (height, width)
    thumbnail = encoded(4, 4)
    whole = encoded(subsampling=subsampling, exif=b"Exif\0\0" + thumbnail, comment=b"\xff\xc2\xff\xda")
    assert plain_jpeg_size(whole) == (20, 30)  # markers within other segments are not looked at
    assert plain_jpeg_size(whole + b"\0\0") == (20, 30)
    assert plain_jpeg_size(whole[:2] + b"\xff\xff" + whole[2:]) == (20, 30)  # filled up before a marker
    assert plain_jpeg_size(with_segment(whole, 0xEE, b"Adobe\0\x64\0\0\0\0\x01")) == (20, 30)


def test_what_is_odd_is_left_to_the_worker() -> None:
    plain = encoded()
    at = frame_at(plain)
    odd = {
        "on its side": encoded(exif=SIDEWAYS),
        "PNG": encoded(format="PNG"),
        "grey": encoded(mode="L"),
        "CMYK": encoded(mode="CMYK"),
        "progressive": encoded(progressive=True),
        "RGB, as Adobe marks it": with_segment(plain, 0xEE, b"Adobe\0\x64\0\0\0\0\x00"),
        "RGB, by its names": changed(changed(changed(plain, at + 6, 82), at + 9, 71), at + 12, 66),
        "RGB, as Pillow keeps it": encoded(keep_rgb=True),
        "twelve bits": changed(plain, at, 12),
        "no height yet": changed(plain, at + 1, 0, 0),
        "too large": changed(plain, at + 1, 0xFF, 0xFF, 0xFF, 0xFF),
        "sampled oddly": changed(plain, at + 10, 0x21),
        "cut short": plain[:-30],
        "a header alone": plain[: plain.index(b"\xff\xda")] + b"\xff\xd9",
        "a segment past the end": plain[:2] + b"\xff\xe1\xff\xff" + plain[6:],
        "no marker": plain[:2] + b"\x00" + plain[2:],
        "nothing": b"",
        "start and end": b"\xff\xd8\xff\xd9",
    }
    assert plain_jpeg_size(plain) == (20, 30)
    assert [name for name, data in odd.items() if plain_jpeg_size(data)] == []


def test_every_beginning_of_a_photograph_is_cut_short() -> None:
    data = encoded()
    assert not any(plain_jpeg_size(data[:length]) for length in range(len(data) - 1))
    header = data[: data.index(b"\xff\xda") + 1]
    assert not any(plain_jpeg_size(header[:length] + b"\xff\xd9") for length in range(len(header)))


def test_a_window_is_where_the_framing_puts_it() -> None:
    data = encoded(32, 40)
    assert FRAMING.scaled_crop(data, None) == ScaledCrop((32, 40), (16, 20), (1, 3), False)
    assert FRAMING.scaled_crop(data, [0.99, 0.0, 0.4]) == ScaledCrop((32, 40), (16, 20), (2, 0), True)
    assert FRAMING.scaled_crop(encoded(32, 40, "L"), None) is None
    fixed = Framing((14, 14), (32, 40), None, 0, False, (0, 0, 0))
    assert fixed.scaled_crop(data, None) == ScaledCrop((32, 40), (32, 40), (9, 13), False)
    assert fixed.scaled_crop(encoded(32, 41), None) is None  # has to be fitted
