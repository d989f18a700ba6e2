from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Augment, Loader, Split, Standardize, StreamedSplit, Whiten, make_loader, open_data
from lowrank_cnn.data.streamed import loaded

VARIED = Augment(crop=9, pad=1, mirror=True, cutout=2)
Batches = list[tuple[Tensor, Tensor]]


def streamed(folder: Path, which: str = "train", **options: object) -> StreamedSplit:
    chosen: dict = {"resident_bytes": 0, **options}
    split = getattr(open_data(folder, **chosen), which)
    assert isinstance(split, StreamedSplit)
    return split


def loader(split: Split, *, train: bool = True, **options: object) -> Loader:
    chosen: dict = {"batch_size": 8, "preprocess": None, "augment": VARIED, "seed": 3, "device": "cpu"}
    return make_loader(split, train=train, **{**chosen, **options})


IN_MEMORY_AND_STREAMED = pytest.mark.parametrize("held", [2**31, 0], ids=["in memory", "streamed"])


def same(one: Batches, two: Batches) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(one, two, strict=True)
    )


@pytest.fixture
def numbered(tmp_path: Path, write_shards) -> Path:
    """48 grey images in three shards, every pixel of which is the number of the image, as is the label."""

    def flat(number: int) -> bytes:
        out = io.BytesIO()
        Image.new("L", (10, 10), number).save(out, "PNG")
        return out.getvalue()

    names = [str(number) for number in range(48)]
    rows = [[(flat(number), number) for number in range(first, first + 16)] for first in (0, 16, 32)]
    write_shards(tmp_path, "train", rows, names=names)
    write_shards(tmp_path, "test", [[(flat(number), number) for number in range(19)]], names=names)
    return tmp_path


def numbers(batches: Batches) -> list[int]:
    """Which images were shown; each must carry its own label."""
    found = []
    for images, labels in batches:
        assert torch.equal((images.amax((1, 2, 3)) * 255).round().long(), labels)
        found += labels.tolist()
    return found


@IN_MEMORY_AND_STREAMED
def test_an_epoch_shows_every_image_once_in_an_order_of_its_own(numbered: Path, held: int) -> None:
    data = open_data(numbered, resident_bytes=held)
    orders = {
        (seed, epoch): numbers(list(loader(data.train, seed=seed).epoch(epoch)))
        for seed in (3, 4)
        for epoch in (0, 1)
    }
    assert all(sorted(order) == list(range(48)) for order in orders.values())
    assert len(set(map(tuple, orders.values()))) == 4
    again = open_data(numbered, resident_bytes=held)
    assert orders[3, 1] == numbers(list(loader(again.train).epoch(1)))
    assert [len(labels) for _, labels in loader(data.train, batch_size=10).epoch(0)] == [10] * 4  # whole batches
    parts = data.holdout(16, seed=1)
    trained, tested = (
        numbers(list(loader(parts.train).epoch(0))),
        numbers(list(loader(parts.test, train=False).epoch(0))),
    )
    assert sorted(trained + tested) == list(range(48))


@IN_MEMORY_AND_STREAMED
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_evaluate_every_image_once(numbered: Path, world: int, held: int) -> None:
    split = open_data(numbered, resident_bytes=held).test
    options = {"train": False, "batch_size": 6, "world": world}
    parts = [list(loader(split, rank=rank, **options).epoch(0)) for rank in range(world)]
    assert sorted(number for part in parts for number in numbers(part)) == list(range(19))
    assert max(len(part) for part in parts) == len(loader(split, **options)) == 4
    assert all(len(labels) for part in parts for _, labels in part)
    assert world > 1 or numbers(parts[0]) == list(range(19))


@IN_MEMORY_AND_STREAMED
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_train_on_the_batches_of_one(damaged: Path, world: int, held: int) -> None:
    split = open_data(damaged, resident_bytes=held).train
    alone = list(loader(split).epoch(2))
    parts = [list(loader(split, rank=rank, world=world).epoch(2)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(alone)} == {len(split) // 8}
    joined = [tuple(map(torch.cat, zip(*batch, strict=True))) for batch in zip(*parts, strict=True)]
    assert same(alone, joined)


@IN_MEMORY_AND_STREAMED
@pytest.mark.parametrize(("start", "workers"), [(1, 0), (4, 2), (5, 0), (0, 2)])
def test_resuming_within_an_epoch_goes_on_where_it_was(shards: Path, start: int, workers: int, held: int) -> None:
    whole, rest = (open_data(shards, resident_bytes=held).train for _ in range(2))
    batches = list(loader(whole).epoch(7))
    assert len(batches) == 5
    assert same(batches[start:], list(loader(rest, workers=workers).epoch(7, start)))


@IN_MEMORY_AND_STREAMED
def test_type_layout_and_preprocessing(shards: Path, held: int) -> None:
    split = open_data(shards, resident_bytes=held).train
    options: dict = {"batch_size": 40, "preprocess": Standardize.fit(split), "augment": Augment(mirror=False)}
    images, labels = next(iter(loader(split, **options, dtype=torch.bfloat16).epoch(0)))
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.float().mean((0, 2, 3)).abs().max() < 0.02
    assert (images.float().std((0, 2, 3)) - 1).abs().max() < 0.02
    assert next(iter(loader(split, channels_last=False).epoch(0)))[0].is_contiguous()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(numbered: Path, workers: int) -> None:
    alone = list(loader(streamed(numbered)).epoch(1))
    drawn = torch.get_rng_state()
    assert same(alone, list(loader(streamed(numbered), workers=workers).epoch(1)))
    assert torch.equal(drawn, torch.get_rng_state())  # dropout draws the same numbers, whoever reads the images
    tested = list(loader(streamed(numbered, "test"), train=False).epoch(0))
    assert same(tested, list(loader(streamed(numbered, "test"), train=False, workers=workers).epoch(0)))


def test_ranks_read_shards_of_their_own(numbered: Path) -> None:
    """With three shards and three processes of one lane each, none reads another's shard."""
    for epoch in range(3):
        shown = [
            {number // 16 for number in numbers(list(made.epoch(epoch)))}
            for rank in range(3)
            if (made := loader(streamed(numbered), batch_size=3, rank=rank, world=3))
        ]
        assert sorted(map(tuple, shown)) == [(0,), (1,), (2,)]


@pytest.fixture
def damaged(tmp_path: Path, write_shards) -> Path:
    """64 rows, of which 5 and 40 are no images and one row group of eight is all junk."""
    rows: list[tuple[bytes | int, int]] = [(number, 0) for number in range(64)]
    for number in (5, 40, *range(24, 32)):
        rows[number] = (b"junk", 1)
    write_shards(tmp_path, "train", [rows[:32], rows[32:]], group_rows=8)
    write_shards(tmp_path, "test", [rows])
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_of_a_stream_are_replaced_counted_and_named(damaged: Path, workers: int) -> None:
    split = streamed(damaged)
    made = loader(split, workers=workers)
    for epoch in range(2):
        batches = list(made.epoch(epoch))
        assert [len(labels) for _, labels in batches] == [8] * 8
        assert all((labels == 0).all() for _, labels in batches)
    assert split.problems.counts == {"undecodable image": 10}
    rows = {(0, 5), (1, 8), *((0, row) for row in range(24, 32))}
    names = {f"train-{shard:05d}-of-00002.parquet:{row}: not a known image format" for shard, row in rows}
    assert len(split.problems.examples["undecodable image"]) == 5
    assert set(split.problems.examples["undecodable image"]) <= names
    with pytest.raises(LowRankError, match=r"undecodable images? \(train-0000"):
        list(loader(streamed(damaged, bad="refuse"), workers=workers).epoch(0))


def test_bad_images_are_left_out_of_evaluation(damaged: Path) -> None:
    split = streamed(damaged, "test")
    batches = list(loader(split, train=False).epoch(0))
    assert sum(len(labels) for _, labels in batches) == 54
    assert all(len(labels) for _, labels in batches)
    assert len(batches) == 7  # the batch of junk alone is not shown
    assert split.problems.total == 10
    # Pictures are found by their place among the good ones: the last place is that of the last row.
    last = StreamedSplit(split.store, split.rows[-1:], split.size, split.channels)
    assert split.describe(53) == last.describe(0)
    assert torch.equal(split.picture(53), last.picture(0))


def test_a_stream_of_junk_ends_with_a_sentence(damaged: Path, write_shards) -> None:
    split = streamed(damaged)
    write_shards(damaged, "train", [[(b"junk", 0)] * 32] * 2, group_rows=8)  # a disk may fail later
    split.store._held.clear()
    with pytest.raises(LowRankError, match="too many images are bad: 64 undecodable"):
        list(loader(split).epoch(0))


def test_a_damaged_shard_does_not_end_the_run(tmp_path: Path, write_shards) -> None:
    rows = [(number, 0) for number in range(64)]
    files = write_shards(tmp_path, "train", [rows[:32], rows[32:]], group_rows=8)
    write_shards(tmp_path, "test", [rows[:4]])
    split = streamed(tmp_path)
    content = bytearray(files[0].read_bytes())
    content[200:8000] = bytes(7800)
    files[0].write_bytes(content)
    assert sum(len(labels) for _, labels in loader(split).epoch(0)) == 64
    assert split.problems.total >= 8
    files[1].unlink()  # lost altogether while training
    assert sum(len(labels) for _, labels in loader(split).epoch(1)) == 64


@pytest.fixture
def sizes(tmp_path: Path, photo, write_folder) -> Path:
    """Photographs of many sizes and modes in folders."""
    modes = ("RGB", "L", "CMYK")
    images = {
        f"{split}/{'ab'[n % 2]}/{n}.jpg": photo(n, size=(30 + 3 * n, 50 - 2 * n), mode=modes[n % 3], format="JPEG")
        for split in ("train", "val")
        for n in range(12)
    }
    return write_folder(tmp_path, images)


@pytest.mark.parametrize("train", [True, False])
def test_images_of_many_sizes_come_as_one(sizes: Path, train: bool) -> None:
    split = streamed(sizes)
    assert split.size is None
    for augment in (Augment(resize=16, crop=14), Augment(resize=14), Augment(crop=14)):
        for images, labels in loader(split, train=train, batch_size=4, augment=augment).epoch(0):
            assert images.shape == (4, 3, 14, 14)
            assert set(labels.tolist()) <= {0, 1}
    with pytest.raises(LowRankError, match=r"differ in size: give all of them one \(image_size=64\), or set"):
        loader(split, train=train, augment=Augment())
    with pytest.raises(LowRankError, match="crop of 20 does not fit"):
        loader(split, train=train, augment=Augment(resize=16, crop=20))


@IN_MEMORY_AND_STREAMED
def test_crops_are_windows_of_the_padded_image(shards: Path, held: int) -> None:
    """Every image is one window of one padded original, mirrored or not; none is always the same window."""
    split = open_data(shards, resident_bytes=held).train
    mean = Standardize(torch.tensor([50.0, 60.0, 70.0]), torch.ones(3))
    windows = []
    for index in range(len(split)):
        padded = torch.nn.functional.pad(mean(split.picture(index)[None])[0], (1, 1, 1, 1))
        windows.append(padded.unfold(1, 9, 1).unfold(2, 9, 1).permute(1, 2, 0, 3, 4).flatten(0, 1))
    straight = torch.cat(windows)  # 40 images of 6x4 places each
    both = torch.cat([straight, straight.flip(3)])
    places: list[int] = []
    for images, _ in loader(split, preprocess=mean, augment=Augment(crop=9, pad=1)).epoch(0):
        for image in images:
            fitting = (both == image).flatten(1).all(1).nonzero().flatten().tolist()
            assert len(fitting) == 1
            places += fitting
    assert sorted(place // 24 % 40 for place in places) == list(range(40))
    assert len({place % 24 for place in places}) > 10
    assert {place // 960 for place in places} == {0, 1}


def test_cutouts_are_zeros_after_preprocessing(numbered: Path) -> None:
    made = loader(streamed(numbered), augment=Augment(cutout=4, mirror=False))
    cut = [int((image == 0).sum()) for images, _ in made.epoch(0) for image in images if image.max() > 0]
    assert max(cut) == 16
    assert all(4 <= count <= 16 for count in cut)


def test_whitening_is_refused(shards: Path) -> None:
    split = streamed(shards)
    with pytest.raises(LowRankError, match="held in memory"):
        Whiten.fit(split)
    with pytest.raises(LowRankError, match="streamed"):
        loader(split, preprocess=Whiten(torch.zeros(360), torch.eye(360)))


@pytest.mark.parametrize("resize", [24, 150])
def test_a_resize_above_the_image_size_shows_the_pixels_of_a_set_in_memory(
    tmp_path: Path, photo, write_folder, resize: int
) -> None:
    files = {
        f"{split}/a/{n}.jpg": photo(n, size=(300, 400), format="JPEG")
        for split in ("train", "val")
        for n in (0, 1)
    }
    root = write_folder(tmp_path / "photos", files)
    seen = []
    for held in (2**31, 0):
        split = open_data(root, image_size=16, resident_bytes=held).test
        how = {"preprocess": None, "augment": Augment(resize=resize, crop=16), "seed": 0, "device": "cpu"}
        seen.append(next(iter(make_loader(split, batch_size=2, train=False, **how).epoch(0)))[0])
    assert 255 * (seen[0] - seen[1]).abs().max() < 1.5


class Failing(Dataset):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "workers", "says"),
    [
        (LowRankError("too many files are open."), 1, "^too many files are open.$"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            0,
            "^a process that reads .* killed",
        ),
        (KeyError("other"), 1, "other"),
    ],
)
def test_errors_of_workers_are_one_sentence(error: Exception, workers: int, says: str) -> None:
    kind = KeyError if isinstance(error, KeyError) else LowRankError
    with pytest.raises(kind, match=says):
        next(loaded(DataLoader(Failing(error), sampler=[0], num_workers=workers)))
