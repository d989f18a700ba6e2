from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lowrank_cnn.data.decode import BadImageError, Framing, ScaledCrop
from lowrank_cnn.data.types import Contents
from lowrank_cnn.data.workers import TOO_MANY, BatchImage, BatchPart, EncodedImages, EpochParts, trouble_of

FRAMING = Framing((8, 8), None, 8, 0, True, (0, 0, 0))
CROP = ScaledCrop((8, 8), (8, 8), (0, 0), False)


def jpeg(shade: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(out, "JPEG")
    return out.getvalue()


class Shades:
    """A store whose row n is an image of the shade n; some rows cannot be read."""

    def __init__(self, n: int, bad: tuple[int, ...] = ()) -> None:
        self.labels, self.bad = torch.arange(n), bad
        self.contents = Contents(["."], n)

    def file_of(self, row: int) -> int:
        return 0

    def read(self, row: int) -> bytes:
        if row in self.bad:
            raise BadImageError("no bytes")
        return jpeg(row)

    def where(self, row: int) -> str:
        return f"row {row}"


def parts_of(
    store: Shades, lanes: Tensor, *, per_lane: int = 2, draw: bool = True, encoded: bool = False
) -> EpochParts:
    drawn = ("crops", 0, 0) if draw else None
    return EpochParts(store, lanes, range(len(lanes)), per_lane, 2, 3, FRAMING, drawn, encoded)  # type: ignore


def test_a_batch_takes_as_many_rows_from_each_lane() -> None:
    parts = parts_of(Shades(12), torch.arange(12).view(2, 6))
    assert parts.batches == 3
    assert [parts[1, part].labels for part in (0, 1)] == [[2, 3], [8, 9]]
    images = parts[1, 0].images
    assert images.shape == (2, 8, 8, 3)
    assert [int(image.float().mean().round()) for image in images] == [2, 3]


def test_another_row_replaces_a_bad_one_in_training() -> None:
    part = parts_of(Shades(12, bad=(3,)), torch.arange(12).view(2, 6))[1, 0]
    assert len(part.labels) == 2
    assert 3 not in part.labels
    assert part.found == [("undecodable image", "row 3: no bytes")]
    assert part.failure == ""


def test_evaluation_leaves_bad_images_out() -> None:
    part = parts_of(Shades(4, bad=(1,)), torch.arange(4)[None], per_lane=4, draw=False)[0, 1]
    assert part.labels == [0, 2, 3]
    assert part.failure == ""


def test_a_run_fails_if_all_images_are_bad() -> None:
    part = parts_of(Shades(4, bad=(0, 1, 2, 3)), torch.arange(4).view(2, 2))[0, 0]
    assert (part.labels, part.failure) == ([], TOO_MANY)
    assert trouble_of([part, part]) == (part.found * 2, TOO_MANY)


def test_jpegs_for_a_gpu_are_handed_on_as_they_are() -> None:
    part = parts_of(Shades(4), torch.arange(4).view(2, 2), encoded=True)[0, 0]
    assert part.encoded is not None
    assert len(part.images) == 0
    assert [bytes(data.tolist()) for data, _ in part.encoded.jpegs()] == [jpeg(0), jpeg(1)]


def test_joined_jpegs_come_apart_again() -> None:
    first, second = jpeg(1), jpeg(2)
    images = {0: BatchImage(first, CROP, 0), 1: BatchImage(b"pixels", None, 0), 3: BatchImage(second, CROP, 1)}
    joined = pickle.loads(pickle.dumps(EncodedImages.of(images)))
    assert [(bytes(data.tolist()), crop) for data, crop in joined.jpegs()] == [(first, CROP), (second, CROP)]
    assert joined.places == [0, 1, 3]
    assert EncodedImages.of({0: BatchImage(b"pixels", None, 0)}).jpegs() == []


@pytest.mark.parametrize("part", [0, 1])
def test_the_cpu_can_frame_an_image_that_the_gpu_refused(part: int) -> None:
    parts = parts_of(Shades(4), torch.arange(4).view(2, 2), encoded=True)
    image = parts.framed(0, part, 1, [])
    assert image is not None
    assert image.crop is None
    assert image.label == 2 * part + 1
    assert isinstance(parts[0, part], BatchPart)
