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


def _photo(seed: int = 0, *, size: tuple[int, int] = (12, 10), mode: str = "RGB", format: str = "PNG") -> bytes:
    """Random pixels of this height and width as an image file; the seed is their identity."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, format)
    return out.getvalue()


@pytest.fixture(scope="session")
def photo() -> Callable[..., bytes]:
    return _photo


@pytest.fixture(scope="session")
def write_shards() -> Callable[..., list[Path]]:
    def write(
        folder: Path,
        split: str,
        shards: Sequence[Sequence[tuple[bytes | int | None, int | None]]],
        *,
        names: Sequence[str] | None = ("cat", "dog", "owl"),
        columns: tuple[str, str] = ("image", "label"),
        group_rows: int = 4,
    ) -> list[Path]:
        """One parquet file in the Hugging Face layout for each list of (image file or photo's number, label)."""
        folder.mkdir(parents=True, exist_ok=True)
        image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        schema = pa.schema({columns[0]: image, columns[1]: pa.int64()})
        if names is not None:
            features = {columns[1]: {"names": list(names), "_type": "ClassLabel"}}
            schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        files = []
        for number, rows in enumerate(shards):
            files_of = [(_photo(image) if isinstance(image, int) else image, label) for image, label in rows]
            data = [{columns[0]: {"bytes": data, "path": None}, columns[1]: label} for data, label in files_of]
            files.append(folder / f"{split}-{number:05d}-of-{len(shards):05d}.parquet")
            pq.write_table(pa.Table.from_pylist(data, schema), files[-1], row_group_size=group_rows)
        return files

    return write


@pytest.fixture
def shards(tmp_path: Path, write_shards) -> Path:
    """Three train shards of 16, 12 and 12 images, and one of 10 to test on, labels by turns."""
    bounds = ((0, 16), (16, 28), (28, 40))
    write_shards(tmp_path, "train", [[(number, number % 3) for number in range(*bound)] for bound in bounds])
    write_shards(tmp_path, "test", [[(100 + number, number % 3) for number in range(10)]])
    return tmp_path


@pytest.fixture(scope="session")
def write_folder() -> Callable[..., Path]:
    def write(root: Path, images: dict[str, bytes | int]) -> Path:
        """An image folder: path below the root to file content, or to the number of a photo."""
        for name, content in images.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            format = "JPEG" if name.lower().endswith("jpg") else "PNG"
            (root / name).write_bytes(content if isinstance(content, bytes) else _photo(content, format=format))
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
