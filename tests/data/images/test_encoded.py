from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lowrank_cnn.data.images.encoded import Window, join, plain_size, window_of
from lowrank_cnn.data.images.framing import Framing

FRAMING = Framing((14, 14), None, 16, 0, True, (0, 0, 0))


def encoded(height: int = 20, width: int = 30, mode: str = "RGB", format: str = "JPEG", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, format, **options)
    return out.getvalue()


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """The JPEG with one more segment in front."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + data[2:]


def frame_at(data: bytes) -> int:
    """Where the body of the baseline frame begins."""
    return data.index(b"\xff\xc0") + 4


def changed(data: bytes, at: int, *values: int) -> bytes:
    return data[:at] + bytes(values) + data[at + len(values) :]


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_plain_photograph_tells_its_size(subsampling: str) -> None:
    for height, width in ((20, 30), (300, 17), (1, 1)):
        assert plain_size(encoded(height, width, subsampling=subsampling)) == (height, width)
    thumbnail = encoded(4, 4)
    whole = encoded(subsampling=subsampling, exif=b"Exif\0\0" + thumbnail, comment=b"\xff\xc2\xff\xda")
    assert plain_size(whole) == (20, 30)  # markers within other segments are not looked at
    assert plain_size(whole + b"\0\0") == (20, 30)
    assert plain_size(whole[:2] + b"\xff\xff" + whole[2:]) == (20, 30)  # filled up before a marker
    assert plain_size(with_segment(whole, 0xEE, b"Adobe\0\x64\0\0\0\0\x01")) == (20, 30)


def test_what_is_odd_is_left_to_the_worker() -> None:
    plain = encoded()
    at = frame_at(plain)
    odd = {
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
        "scan by scan": changed(plain, plain.index(b"\xff\xda") + 4, 1),
        "cut short": plain[:-30],
        "a header alone": plain[: plain.index(b"\xff\xda")] + b"\xff\xd9",
        "a segment past the end": plain[:2] + b"\xff\xe1\xff\xff" + plain[6:],
        "a segment of no length": plain[:2] + b"\xff\xe1\x00\x00" + plain[6:],
        "no marker": plain[:2] + b"\x00" + plain[2:],
        "nothing": b"",
        "start and end": b"\xff\xd8\xff\xd9",
    }
    assert plain_size(plain) == (20, 30)
    assert [name for name, data in odd.items() if plain_size(data)] == []


def test_every_beginning_of_a_photograph_is_cut_short() -> None:
    data = encoded()
    assert not any(plain_size(data[:length]) for length in range(len(data) - 1))
    header = data[: data.index(b"\xff\xda") + 1]
    assert not any(plain_size(header[:length] + b"\xff\xd9") for length in range(len(header)))


def test_a_window_is_where_the_framing_puts_it() -> None:
    data = encoded(32, 40)
    assert window_of(data, FRAMING, None) == Window((32, 40), (16, 20), (1, 3), False)
    assert window_of(data, FRAMING, [0.99, 0.0, 0.4]) == Window((32, 40), (16, 20), (2, 0), True)
    assert window_of(encoded(32, 40, "L"), FRAMING, None) is None
    fixed = Framing((14, 14), (32, 40), None, 0, False, (0, 0, 0))
    assert window_of(data, fixed, None) == Window((32, 40), (32, 40), (9, 13), False)
    assert window_of(encoded(32, 41), fixed, None) is None  # has to be fitted


def test_joined_jpegs_come_apart_again() -> None:
    data = [encoded(20, width) for width in (30, 31)]
    windows = [window_of(one, FRAMING, None) for one in data]
    part = pickle.loads(pickle.dumps(join(data, [windows[0], None, windows[1]], [0, 1, 3])))
    assert [(bytes(jpeg.tolist()), window) for jpeg, window in part.jpegs()] == list(
        zip(data, windows, strict=True)
    )
    assert join([], [None], [0]).jpegs() == []
