from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowrank_cnn.data.augment import scaled
from lowrank_cnn.data.images import framing as module
from lowrank_cnn.data.images.decode import BadImageError
from lowrank_cnn.data.images.framing import (
    Framer,
    Framing,
    frame_by_pillow,
    frame_by_simplejpeg,
    frame_by_torch,
    framer,
)

WAYS = [frame_by_pillow, frame_by_torch]
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


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40)
@given(
    size=st.tuples(st.integers(14, 60), st.integers(14, 60)),
    draws=st.none() | st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3),
)
def test_a_window_is_that_of_the_whole_scaled_image(
    way: Framer, size: tuple[int, int], draws: list[float] | None
) -> None:
    data = smooth(*size)
    window = np.frombuffer(way(data, FRAMING, 3, draws), np.uint8).reshape(14, 14, 3)
    difference = np.abs(window.astype(int) - plain(data, FRAMING, draws))
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.5


@pytest.mark.parametrize("way", WAYS)
def test_an_image_of_the_right_scale_is_only_cropped(way: Framer) -> None:
    data = smooth(16, 20)
    window = np.frombuffer(way(data, FRAMING, 3, [0.99, 0.0, 0.9]), np.uint8).reshape(14, 14, 3)
    assert (window == np.asarray(Image.open(io.BytesIO(data)))[2:16, :14]).all()


@pytest.mark.parametrize(
    ("format", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "L")]
)
def test_ways_agree_on_every_kind_of_image(format: str, mode: str) -> None:
    data = smooth(40, 31, format, mode)
    for channels in (1, 3):
        one, other = (np.frombuffer(way(data, FRAMING, channels, None), np.uint8).astype(int) for way in WAYS)
        assert len(one) == 14 * 14 * channels
        assert np.abs(one - other).max() <= 1


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_image_is_refused_with_its_reason(way: Framer) -> None:
    with pytest.raises(BadImageError, match="not a known image format"):
        way(b"junk", FRAMING, 3, None)
    with pytest.raises(BadImageError, match="truncated"):
        way(smooth(40, 40, "JPEG")[:-60], FRAMING, 3, None)


def test_padding_and_a_common_size_are_pillows_in_both_ways(photo: Callable[..., bytes]) -> None:
    padded = Framing((14, 14), (16, 16), 16, 2, True, (1, 2, 3))
    draws = [0.0, 0.0, 0.9]
    one, other = (np.frombuffer(way(photo(0), padded, 3, draws), np.uint8) for way in WAYS)
    assert (one == other).all()
    assert (one.reshape(14, 14, 3)[:2] == [1, 2, 3]).all()


def test_large_jpegs_come_at_a_reduced_scale() -> None:
    data = smooth(160, 200, "JPEG")
    one, other = (np.frombuffer(way(data, FRAMING, 3, None), np.uint8).astype(int) for way in WAYS)
    assert np.abs(one - other).max() <= 1


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


by_simplejpeg = partial(frame_by_simplejpeg, otherwise=frame_by_pillow)


@pytest.mark.parametrize("draws", [None, [0.3, 0.9, 0.9], [0.3, 0.9, 0.2]])
@pytest.mark.parametrize("size", [(16, 20), (20, 16), (16, 16)])
def test_a_jpeg_of_the_right_scale_is_cut_out(
    stand_in: StandIn, size: tuple[int, int], draws: list[float] | None
) -> None:
    for mode in ("RGB", "L"):
        data = smooth(*size, "JPEG", mode)
        assert by_simplejpeg(data, FRAMING, 3, draws) == frame_by_pillow(data, FRAMING, 3, draws)
    assert stand_in.decoded == ["BGR" if draws and draws[2] < 0.5 else "RGB"] * 2


def test_what_simplejpeg_cannot_do_is_framed_otherwise(stand_in: StandIn) -> None:
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
        assert by_simplejpeg(data, framing, channels, None) == frame_by_pillow(data, framing, channels, None)
    assert stand_in.decoded == []
    assert by_simplejpeg(smooth(16, 20, "JPEG"), right, 3, None)
    assert stand_in.decoded == ["RGB"]


@pytest.mark.parametrize("way", [by_simplejpeg, frame_by_torch])
def test_pillow_says_what_is_wrong_with_a_jpeg(stand_in: StandIn, way: Framer) -> None:
    whole = smooth(16, 20, "JPEG")
    for data, reason in ((whole[:-60], "truncated"), (whole[:3], "not a known image format")):
        with pytest.raises(BadImageError, match=reason):
            way(data, FRAMING, 3, None)
    assert stand_in.decoded == []


@pytest.mark.parametrize("way", [by_simplejpeg, frame_by_torch])
def test_without_simplejpeg_pillow_decodes(way: Framer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    data = smooth(16, 20, "JPEG")
    for draws in (None, [0.3, 0.9, 0.2]):
        assert way(data, FRAMING, 3, draws) == frame_by_pillow(data, FRAMING, 3, draws)


def test_simplejpeg_gives_the_pixels_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    for mode, size in (
        ("RGB", (30, 41)),
        ("L", (30, 41)),
        ("CMYK", (30, 41)),
        ("RGB", (90, 120)),
        ("RGB", (16, 20)),
    ):
        data = smooth(*size, "JPEG", mode)
        for draws in (None, [0.3, 0.9, 0.2]):
            ways = [partial(way, data, FRAMING, 3, draws) for way in (frame_by_torch, by_simplejpeg)]
            fast = [way() for way in ways]
            with monkeypatch.context() as patch:
                patch.setattr(module, "_simplejpeg", lambda: None)
                assert fast == [way() for way in ways]
    for way in (frame_by_torch, by_simplejpeg):
        with pytest.raises(BadImageError):
            way(smooth(16, 20, "JPEG")[:-60], FRAMING, 3, None)


def test_the_way_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, way in (("AVX2", frame_by_torch), ("AVX512", frame_by_torch), ("DEFAULT", frame_by_pillow)):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda name=capability: name)
        for jpeg in (None, StandIn()):
            monkeypatch.setattr(module, "_simplejpeg", lambda jpeg=jpeg: jpeg)
            framer.cache_clear()
            found = framer()
            assert (found.keywords["otherwise"] if isinstance(found, partial) else found) is way
            assert isinstance(found, partial) is (jpeg is not None)
    framer.cache_clear()
