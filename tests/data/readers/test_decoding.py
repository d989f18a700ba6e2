from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.decode import BadImageError
from lowrank_cnn.data.store import OTHER_SIZE, decode_rows, first_readable, read_headers, sample_rows
from lowrank_cnn.data.types import Contents, Problems

Photo = Callable[..., bytes]


@dataclass
class Files:
    """Encoded images in memory; an empty one cannot be read."""

    files: list[bytes]
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.labels = torch.arange(len(self.files))
        self.contents = Contents(["."], len(self.files))

    def file_of(self, row: int) -> int:
        return 0

    def read(self, row: int) -> bytes:
        if not self.files[row]:
            raise BadImageError("no bytes")
        return self.files[row]

    def where(self, row: int) -> str:
        return f"row {row}"

    def version(self) -> str:
        return "1"


def decoded(store: Files, *, any_size: bool = False, bad: str = "skip", problems: Problems | None = None):
    return decode_rows(
        store,  # type: ignore[arg-type]
        torch.arange(len(store.files)),
        size=(3, 12, 10),
        any_size=any_size,
        bad=bad,  # type: ignore[arg-type]
        problems=Problems() if problems is None else problems,
    )


def test_bad_images_are_left_out_with_their_labels(photo: Photo) -> None:
    problems = Problems()
    found = decoded(Files([photo(0), b"", b"junk", photo(3)]), problems=problems)
    assert found.images.shape == (2, 3, 12, 10)
    assert found.labels.tolist() == [0, 3]
    assert [found.describe(place) for place in (0, 1)] == ["row 0", "row 3"]
    assert problems.counts == {"undecodable image": 2}


def test_bad_images_are_refused_where_asked(photo: Photo) -> None:
    with pytest.raises(LowRankError, match="bad images: 1 undecodable image"):
        decoded(Files([photo(0), b"junk"]), bad="refuse")
    with pytest.raises(LowRankError, match="none of 2 images can be decoded"):
        decoded(Files([b"", b"junk"]))


def test_images_of_another_size_are_resized_and_counted_unless_expected(photo: Photo) -> None:
    store = Files([photo(0), photo(1, size=(24, 20))])
    problems = Problems()
    images = decoded(store, problems=problems).images
    assert problems.found == [(OTHER_SIZE, "row 1: 24x20")]
    problems = Problems()
    assert torch.equal(decoded(store, any_size=True, problems=problems).images, images)
    assert not problems


def test_headers_are_a_sample_of_what_can_be_read(photo: Photo) -> None:
    store = Files([photo(0), b"", photo(2, size=(5, 7), mode="L")])
    found = [(header.height, header.width, header.grey) for header in read_headers(store, torch.arange(3))]  # type: ignore[arg-type]
    assert found == [(12, 10, False), (5, 7, True)]


@pytest.mark.parametrize(("n", "most"), [(0, 8), (5, 8), (1000, 64), (1001, 64)])
def test_a_sample_has_distinct_rows_in_short_runs(n: int, most: int) -> None:
    rows = sample_rows(n, most)
    assert len(rows) == min(n, most)
    assert len(set(rows.tolist())) == len(rows)
    assert not len(rows) or 0 <= int(rows.min()) <= int(rows.max()) < n


def test_the_first_image_that_can_be_decoded_is_found(photo: Photo) -> None:
    cut = photo(1)[:60]  # its header can be read
    found = first_readable(Files([b"", cut, b"junk", photo(3)]), torch.arange(4), "of photos")  # type: ignore[arg-type]
    assert (found.height, found.width) == (12, 10)


def test_unreadable_images_are_counted_and_the_first_is_named(photo: Photo) -> None:
    store = Files([b"junk", photo(1)[:60], b""])
    says = "none of the 3 images of photos can be read; the first is row 0: not a known image format"
    with pytest.raises(LowRankError, match=says):
        first_readable(store, torch.arange(3), "of photos")  # type: ignore[arg-type]
    with pytest.raises(
        LowRankError, match="none of the 1 image to test on can be read; the first is row 2: no bytes"
    ):
        first_readable(store, torch.tensor([2]), "to test on")  # type: ignore[arg-type]
