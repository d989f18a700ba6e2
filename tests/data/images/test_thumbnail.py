"""Small pictures show the image, small enough for a record."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image

from lowrank_cnn.data.decode import SIDE, thumbnail
from lowrank_cnn.report.records import LARGEST_THUMBNAIL


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


def test_images_of_other_channels_have_no_picture() -> None:
    assert thumbnail(None) is None
    assert thumbnail(torch.zeros(5, 8, 8, dtype=torch.uint8)) is None
