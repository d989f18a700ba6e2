"""Small files that stand for much data are refused in a sentence, within bounds of memory."""

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

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.data.parquet import MOST_ROWS, read_binaries, read_integers

ROOT = Path(__file__).parents[3]
GIB = 2**30
BOMB = """
import resource, sys
from lowrank_cnn.data import open_data
try:
    data = open_data(sys.argv[1], limit=10)
    data.train.labels
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB")
"""


def image(size: int = 8) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (size, size), (200, 10, 10)).save(out, "PNG")
    return out.getvalue()


def write(folder: Path, images: pa.Array, labels: pa.Array, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    table = pa.table({"image": images, "label": labels})
    for split in ("train", "test"):
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", **options)


def opened(folder: Path) -> str:
    """What opening the folder prints, in a process that may take 2 GiB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * GIB, 2 * GIB))

    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, preexec_fn=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def test_columns_read_as_they_were_written(tmp_path):
    images = [image(size) for size in range(1, 40)]
    labels = pa.array([*range(38), None], pa.int16())
    write(tmp_path, pa.array(images, pa.binary()), labels, row_group_size=20)
    with pq.ParquetFile(tmp_path / "train-00000-of-00001.parquet") as file:
        assert read_integers(file, "label", missing=-7).tolist() == [*range(38), -7]
    assert read_binaries(tmp_path / "train-00000-of-00001.parquet", "image", 1).to_pylist() == images[20:]


def test_null_rows_beyond_any_set_are_refused(tmp_path):
    rows = MOST_ROWS + 1
    write(tmp_path, pa.nulls(rows, pa.binary()), pa.nulls(rows, pa.int64()))
    assert (tmp_path / "train-00000-of-00001.parquet").stat().st_size < 2**20
    assert "LowRankError" in (said := opened(tmp_path))
    assert "rows" in said


def test_equal_values_stored_once_are_not_all_decoded(tmp_path):
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array([bytes(2**20)], pa.binary()))
    write(tmp_path, large, pa.array([0] * 4000), store_schema=False)
    assert "none of the 4,000 images" in opened(tmp_path)


def test_a_group_that_states_more_than_the_bound_is_not_read(tmp_path, monkeypatch):
    write(tmp_path, pa.array([image()] * 4, pa.binary()), pa.array([0, 1, 0, 1]))
    monkeypatch.setattr("lowrank_cnn.data.parquet.LARGEST_GROUP", 10)
    assert read_binaries(tmp_path / "train-00000-of-00001.parquet", "image", 0) is None


def test_many_rows_without_labels_are_one_sentence(tmp_path):
    rows = 200_000
    write(tmp_path, pa.nulls(rows, pa.binary()), pa.nulls(rows, pa.int64()))
    with pytest.raises(LowRankError):
        open_data(tmp_path)


def test_a_shard_that_claims_very_many_others_is_refused(tmp_path):
    write(tmp_path, pa.array([image()] * 4, pa.binary()), pa.array([0, 1, 0, 1]))
    (tmp_path / "train-00000-of-00001.parquet").rename(tmp_path / "train-00000-of-99999999999.parquet")
    with pytest.raises(LowRankError, match="one of 99,999,999,999 shards"):
        open_data(tmp_path)
    (tmp_path / "train-00000-of-99999999999.parquet").rename(tmp_path / "train-00000-of-00100.parquet")
    with pytest.raises(LowRankError, match=r"lacks the shard .* and 94 more\.$"):
        open_data(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_regular_file_is_no_shard(tmp_path, kind):
    write(tmp_path, pa.array([image()] * 4, pa.binary()), pa.array([0, 1, 0, 1]))
    odd = tmp_path / "train-00000-of-00001.parquet"
    odd.unlink()
    {"fifo": lambda: os.mkfifo(odd), "device": lambda: odd.symlink_to("/dev/zero"), "directory": odd.mkdir}[kind]()
    with pytest.raises(LowRankError):
        open_data(tmp_path)
