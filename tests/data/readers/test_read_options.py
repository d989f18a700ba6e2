"""Options are checked before anything is read."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.data.sources import parse_image_size


@pytest.mark.parametrize("value", [(48, 64), "48x64", [48, 64]])
def test_a_height_and_a_width(value: object) -> None:
    assert parse_image_size(value) == (48, 64)


@pytest.mark.parametrize("value", [64, "64", (64,), " 64 "])
def test_a_square(value: object) -> None:
    assert parse_image_size(value) == (64, 64)


@pytest.mark.parametrize("value", [0, -1, True, "a", "64x", "1x2x3", (1, 2, 3), 1.5, (4, "8"), 10**9, [], {}])
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(LowRankError, match="an image size is a side like 64"):
        open_data("digits", image_size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bad": "maybe"}, "bad must be skip or refuse"),
        ({"limit": 0}, "limit must be a whole number of at least 1"),
        ({"limit": "9"}, "limit must be a whole number"),
        ({"channels": 2}, "channels must be 1"),
        ({"channels": "3"}, "channels must be 1"),
        ({"val_split": 1.0}, "between 0 and 1"),
        ({"val_split": "0.2"}, "between 0 and 1"),
        ({"val_seed": -1}, "val_seed must be"),
        ({"test": 3}, "test must be a path"),
        ({"class_names": 3}, "class_names must be a path"),
        ({"val_split": 0.5}, "test images and class names of its own"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        open_data("digits", **options)  # type: ignore[arg-type]
