"""A miniature of ILSVRC in both of its layouts: photographs of many sizes in folders, and in shards of the Hub."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import conftest as data_fixtures

DRIVER = Path(__file__).with_name("driver.py")
ROOT = DRIVER.parents[2]
write_shards, write_folder = data_fixtures.write_shards, data_fixtures.write_folder
CLASSES = ("n01440764", "n01443537", "n02102040")
TRAIN, TEST = 60, 21


def photograph(number: int) -> bytes:
    """A JPEG of some size, bright at the top, in the middle or at the bottom, as its class says."""
    draw = np.random.default_rng(number)
    height, width = (int(side) for side in draw.integers(36, 64, 2))
    pixels = draw.integers(0, 90, (height, width, 3))
    top = height * (number % len(CLASSES)) // len(CLASSES)
    pixels[top : top + height // len(CLASSES)] += 140
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def folders(tmp_path: Path, write_folder: Callable[..., Path]) -> Path:
    """train/CLASS/*.JPEG and val/CLASS/*.JPEG, as ILSVRC unpacks."""
    images = {
        f"{split}/{CLASSES[number % 3]}/{number}.JPEG": photograph(number)
        for split, numbers in (("train", range(TRAIN)), ("val", range(1000, 1000 + TEST)))
        for number in numbers
    }
    return write_folder(tmp_path / "folders", images)


@pytest.fixture
def hub(tmp_path: Path, write_shards: Callable[..., list[Path]]) -> Path:
    """data/train-*, validation-* and a test-* without labels, as ILSVRC lies on the Hub."""
    rows = [(photograph(number), number % 3) for number in range(TRAIN)]
    valid = [(photograph(number), number % 3) for number in range(1000, 1000 + TEST)]
    root = tmp_path / "hub"
    write_shards(
        root / "data", "train", [rows[first : first + 15] for first in range(0, TRAIN, 15)], names=CLASSES
    )
    write_shards(root / "data", "validation", [valid[:11], valid[11:]], names=CLASSES)
    write_shards(root / "data", "test", [[(photograph(9), -1)]], names=CLASSES)
    return root
