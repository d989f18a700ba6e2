"""Small image sets that the tests write themselves, and where the real ones may lie."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

Photo = Callable[..., bytes]
WriteShards = Callable[..., list[Path]]
WriteFolder = Callable[..., Path]


def _photo(seed: int = 0, *, size: tuple[int, int] = (12, 10), mode: str = "RGB", format: str = "PNG") -> bytes:
    """Random pixels of this height and width as an image file; the seed is their identity."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, format)
    return out.getvalue()


@pytest.fixture(scope="session")
def photo() -> Photo:
    return _photo


@pytest.fixture(scope="session")
def write_shards() -> WriteShards:
    def write(
        folder: Path,
        split: str,
        shards: Sequence[Sequence[tuple[bytes | None, int | None]]],
        *,
        names: Sequence[str] | None = ("cat", "dog", "owl"),
        columns: tuple[str, str] = ("image", "label"),
        group_rows: int = 4,
    ) -> list[Path]:
        """One parquet file in the Hugging Face layout for each list of (image file, label)."""
        folder.mkdir(parents=True, exist_ok=True)
        image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        schema = pa.schema({columns[0]: image, columns[1]: pa.int64()})
        if names is not None:
            features = {columns[1]: {"names": list(names), "_type": "ClassLabel"}}
            schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        files = []
        for number, rows in enumerate(shards):
            data = [{columns[0]: {"bytes": data, "path": None}, columns[1]: label} for data, label in rows]
            files.append(folder / f"{split}-{number:05d}-of-{len(shards):05d}.parquet")
            pq.write_table(pa.Table.from_pylist(data, schema), files[-1], row_group_size=group_rows)
        return files

    return write


@pytest.fixture
def shards(tmp_path: Path, write_shards: WriteShards) -> Path:
    """Three train shards of 16, 12 and 12 images, and one of 10 to test on, labels by turns."""
    bounds = ((0, 16), (16, 28), (28, 40))
    train = [[(_photo(number), number % 3) for number in range(*bound)] for bound in bounds]
    write_shards(tmp_path, "train", train)
    write_shards(tmp_path, "test", [[(_photo(100 + number), number % 3) for number in range(10)]])
    return tmp_path


@pytest.fixture(scope="session")
def write_folder() -> WriteFolder:
    def write(root: Path, images: dict[str, bytes]) -> Path:
        """An image folder: path below the root to file content."""
        for name, content in images.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return root

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real sets beside the checkout, or in LOWRANK_DATA."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("LOWRANK_DATA", beside))
    if not (folder / "cifar10").is_dir():
        pytest.skip(f"no real images: {folder} has no cifar10 (set LOWRANK_DATA)")
    return folder
