from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.data import ResidentSplit, Split, open_data
from lowrank_cnn.data.parquet import MOST_ROWS
from lowrank_cnn.data.types import generator


def resident(split: Split) -> ResidentSplit:
    assert isinstance(split, ResidentSplit)
    return split


def test_shards_are_read_in_order(shards: Path, photo) -> None:
    data = open_data(shards)
    assert data.name == shards.name
    assert data.classes == ("cat", "dog", "owl")
    train, test = resident(data.train), resident(data.test)
    assert train.images.shape == (40, 3, 12, 10)
    assert train.labels.tolist() == [number % 3 for number in range(40)]
    assert test.images.shape == (10, 3, 12, 10)
    assert not train.problems
    assert not test.problems
    in_last_shard = train.images[30].permute(1, 2, 0).contiguous().numpy().tobytes()
    assert in_last_shard == Image.open(io.BytesIO(photo(30))).tobytes()


@pytest.mark.parametrize(
    ("below", "columns", "ending"),
    [
        ("data", ("img", "label"), ""),
        ("plain_text", ("img", "fine_label"), ""),
        ("", ("image", "label"), "-1359597a978bc4fa"),
    ],
)
@pytest.mark.parametrize("test", ["validation", "valid"])
def test_layouts_of_the_hub(tmp_path: Path, write_shards, below: str, columns, ending: str, test: str) -> None:
    for split in ("train", test):
        (file,) = write_shards(tmp_path / below, split, [[(0, 0), (1, 1)]], columns=columns)
        file.rename(file.with_name(f"{file.stem}{ending}.parquet"))
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (2, 2, ("cat", "dog", "owl"))


def test_validation_stands_in_where_test_labels_are_withheld(tmp_path: Path, photo, write_shards) -> None:
    write_shards(tmp_path, "train", [[(0, 0)]])
    write_shards(tmp_path, "validation", [[(1, 2)]])
    write_shards(tmp_path, "test", [[(2, -1), (3, -1)]])
    data = open_data(tmp_path)
    assert data.test.labels.tolist() == [2]
    assert not data.test.problems


def test_validation_shards_beside_test_shards_are_not_used_and_that_is_said(
    tmp_path: Path, photo, write_shards
) -> None:
    for number, split in enumerate(("train", "validation", "test")):
        write_shards(tmp_path, split, [[(number, number)]])
    with pytest.warns(LowRankWarning, match=r"is tested on test; validation is not used\.$"):
        data = open_data(tmp_path)
    assert data.test.labels.tolist() == [2]


def test_labels_are_class_names_where_the_schema_has_none(tmp_path: Path, photo, write_shards) -> None:
    write_shards(tmp_path, "train", [[(n, n) for n in range(4)]], names=None)
    write_shards(tmp_path, "test", [[(9, 3)]], names=None)
    assert open_data(tmp_path).classes == ("0", "1", "2", "3")
    write_shards(tmp_path, "train", [[(0, 10**9)]], names=None)
    with pytest.raises(LowRankError, match="labels go up to 1000000000"):
        open_data(tmp_path)


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(LowRankError, match=r"lacks the shard train-00001-of-00003\.parquet"):
        open_data(shards)


SHARDS = [f"train-0000{n}-of-00003" for n in range(3)]


@pytest.mark.parametrize(
    ("moves", "says"),
    [
        ({SHARDS[2]: "train-00002-of-00004"}, "00003 and 00004"),
        ({SHARDS[0]: "one/train", SHARDS[1]: "two/train"}, "several sets.*one.*two"),
        ({shard: f"x{shard}" for shard in SHARDS} | {"test-00000-of-00001": "y"}, "neither parquet"),
        ({shard: f"x{shard}" for shard in SHARDS}, "and none to train on"),
        (
            {SHARDS[0]: f"train-00000-of-{10**11 - 1}", SHARDS[1]: "x", SHARDS[2]: "y"},
            "one of 99,999,999,999 shards",
        ),
        ({shard: f"{shard[:-5]}00100" for shard in SHARDS}, r"lacks the shard .* and 92 more\.$"),
    ],
)
def test_shards_that_make_no_set(shards: Path, moves: dict[str, str], says: str) -> None:
    for old, new in moves.items():
        (shards / new).parent.mkdir(exist_ok=True)
        (shards / f"{old}.parquet").rename(shards / f"{new}.parquet")
    with pytest.raises(LowRankError, match=says):
        open_data(shards)


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "text"])
def test_what_is_no_regular_parquet_file_is_refused(shards: Path, kind: str) -> None:
    odd = shards / "train-00001-of-00003.parquet"
    odd.unlink()
    make = {"fifo": lambda: os.mkfifo(odd), "device": lambda: odd.symlink_to("/dev/zero"), "directory": odd.mkdir}
    make.get(kind, lambda: odd.write_bytes(b"PAR1 and then nothing"))()
    with pytest.raises(LowRankError, match=r"lacks the shard train-00001|train-00001.* cannot be read as parquet"):
        open_data(shards)


def test_a_set_needs_labelled_shards(tmp_path: Path, write_shards) -> None:
    write_shards(tmp_path, "test", [[(0, -1)]])
    with pytest.raises(LowRankError, match=r"needs shards train-.* with labels; it has test"):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"image": [{"bytes": b"x"}], "class": [1]}, "has no column label, only image, class"),
        ({"image": [{"bytes": b"x"}], "label": ["cat"]}, "holds string, not class numbers"),
        ({"picture": [{"bytes": b"x"}], "label": [1]}, "has no column image with bytes"),
        ({"image": [{"path": "x"}], "label": [1]}, "has no column image with bytes"),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, columns: dict[str, list], sentence: str) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(LowRankError, match=sentence):
        open_data(tmp_path)


def test_plain_bytes_are_images_too(tmp_path: Path, photo) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": [photo(0)], "label": [0]}), tmp_path / f"{split}.parquet")
    assert resident(open_data(tmp_path).train).images.shape == (1, 3, 12, 10)


@pytest.fixture
def spoiled(tmp_path: Path, photo, write_shards) -> Path:
    """Ten training rows of which five are good."""
    rows: list[tuple[bytes | None, int | None]] = [(n, n % 3) for n in range(10)]
    rows[1] = (1, -1)
    rows[2] = (2, 3)
    rows[4] = (4, None)
    rows[5] = (photo(5)[:60], 1)
    rows[7] = (None, 1)
    write_shards(tmp_path, "train", [rows])
    write_shards(tmp_path, "test", [[(0, 0)]])
    return tmp_path


def test_bad_rows_are_counted_named_and_left_out(spoiled: Path) -> None:
    train = resident(open_data(spoiled).train)
    assert train.labels.tolist() == [0, 0, 0, 2, 0]
    assert train.images.shape[0] == 5
    assert train.problems.counts == {"wrong label": 3, "undecodable image": 2}
    shard = "train-00000-of-00001.parquet"
    assert train.problems.examples["wrong label"] == [f"{shard}:1: -1", f"{shard}:2: 3", f"{shard}:4: none"]
    undecodable = train.problems.examples["undecodable image"]
    assert undecodable[0].startswith(f"{shard}:5: ")
    assert undecodable[1] == f"{shard}:7: no bytes"


def test_bad_rows_are_refused_where_asked(spoiled: Path, photo, write_shards) -> None:
    with pytest.raises(LowRankError, match=r"3 wrong labels \(train-00000-of-00001\.parquet:1: -1"):
        open_data(spoiled, bad="refuse")
    write_shards(spoiled, "train", [[(0, 0), (b"junk", 1)]])
    data = open_data(spoiled, bad="refuse")
    with pytest.raises(LowRankError, match=r"1 undecodable image \(train-00000-of-00001\.parquet:1: "):
        len(data.train)


def test_nothing_left_is_an_error(tmp_path: Path, write_shards) -> None:
    for split in ("train", "test"):
        write_shards(tmp_path, split, [[(b"junk", 0)]])
    with pytest.raises(
        LowRankError, match=r"none of the 1 image of .* the first is train-00000-of-00001.parquet:0: not a known"
    ):
        open_data(tmp_path)


def test_an_image_of_another_size_is_resized_and_counted(tmp_path: Path, photo, write_shards) -> None:
    rows = [(n, 0) for n in range(200)]
    rows[24] = (photo(1, size=(30, 20)), 0)  # not among those looked at
    write_shards(tmp_path, "train", [rows])
    write_shards(tmp_path, "test", [rows[:1]])
    train = resident(open_data(tmp_path).train)
    assert train.images.shape == (200, 3, 12, 10)
    assert train.problems.examples == {"resized image": ["train-00000-of-00001.parquet:24: 30x20"]}


def test_grey_sets_stay_grey_and_mixed_ones_become_rgb(tmp_path: Path, photo, write_shards) -> None:
    write_shards(tmp_path, "train", [[(photo(n, mode="L"), 0) for n in range(3)]])
    write_shards(tmp_path, "test", [[(photo(0, mode="RGB"), 0)]])
    data = open_data(tmp_path)
    assert (data.train.channels, data.test.channels) == (1, 1)
    assert resident(data.test).images.shape == (1, 1, 12, 10)
    assert open_data(tmp_path, channels=3).train.size == (3, 12, 10)
    write_shards(tmp_path, "train", [[(photo(0, mode="L"), 0), (1, 0)]])
    mixed = resident(open_data(tmp_path).train)
    assert mixed.images.shape == (2, 3, 12, 10)
    assert torch.equal(mixed.images[0, 0], mixed.images[0, 1])
    assert not torch.equal(mixed.images[1, 0], mixed.images[1, 1])


def test_reading_keeps_shards_together_and_few_row_groups(shards: Path) -> None:
    store = open_data(shards, resident_bytes=0).train.store
    store.keep(places=2, rows=4)
    for row in range(40):
        store.read(row)
        assert len(store._held) <= 4
    assert store.where(17) == "train-00001-of-00003.parquet:1"
    orders = [store.shuffled(generator(seed)) for seed in range(8)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(40))
        shard_of = (order >= 16).long() + (order >= 28).long()
        assert len(shard_of.unique_consecutive()) == 3
    assert len({tuple(order.tolist()) for order in orders}) == 8


def test_classes_that_shards_number_otherwise_are_matched_by_name(tmp_path: Path, photo, write_shards) -> None:
    rows = [(number, number % 3) for number in range(6)]
    write_shards(tmp_path / "own", "train", [rows])
    write_shards(tmp_path / "own", "test", [rows], names=("owl", "cat", "elk"))
    data = open_data(tmp_path / "own")
    assert data.test.labels.tolist() == [2, 0, 2, 0]
    assert data.test.problems.examples == {"unknown class": ["elk: 2 images"]}
    [other] = write_shards(tmp_path / "other", "train", [rows], names=("dog", "cat", "owl"))
    other.rename(tmp_path / "own" / "train.parquet")
    with pytest.raises(LowRankError, match=r"names other classes than train-.*, or in another order"):
        open_data(tmp_path / "own")


BOMB = """
import resource, sys
from lowrank_cnn.data import open_data
for folder in sys.argv[1:]:
    try:
        data = open_data(folder, limit=10)
        data.train.labels
    except Exception as error:
        print(type(error).__name__, error)
"""


def write_columns(folder: Path, images: pa.Array, labels: pa.Array, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        table = pa.table({"image": images, "label": labels})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", **options)


def opened(*folders: Path) -> str:
    """What opening the folders prints, in a process that may take 2 GiB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOMB, *map(str, folders)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, preexec_fn=limit, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def test_small_files_of_very_many_or_very_large_rows_are_not_all_decoded(tmp_path: Path) -> None:
    rows, many, alike = MOST_ROWS + 1, tmp_path / "many", tmp_path / "alike"
    write_columns(many, pa.nulls(rows, pa.binary()), pa.nulls(rows, pa.int64()))
    assert (many / "train-00000-of-00001.parquet").stat().st_size < 2**20
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array([bytes(2**20)], pa.binary()))
    write_columns(alike, large, pa.array([0] * 4000), store_schema=False)
    said = opened(many, alike)
    assert f"LowRankError {many}/train-00000-of-00001.parquet claims" in said
    assert "none of the 4,000 images" in said


def test_a_group_that_states_more_than_the_bound_is_not_read(shards: Path, monkeypatch) -> None:
    monkeypatch.setattr("lowrank_cnn.data.parquet.LARGEST_GROUP", 10)
    with pytest.raises(LowRankError, match=r"none of the 40 images .* row group 0 is unreadable"):
        open_data(shards)


def test_many_rows_without_labels_are_one_sentence(tmp_path: Path) -> None:
    write_columns(tmp_path, pa.nulls(200_000, pa.binary()), pa.array([0, 1] + [-5] * 199_998))
    with pytest.raises(
        LowRankError, match=r"199,998 of 200,000 labels, .* first, are none of the 2 classes: is this"
    ):
        open_data(tmp_path)
