"""`shrink`: store large photographs once at the size that training needs, so that epochs decode fewer pixels.

Training scales a photograph to a shorter side of 256 before it is cropped. More than half of ILSVRC's pixels are
decoded in every epoch only to be averaged away. The shards written here hold JPEGs of that size, in a random
order; `benchmarks/loaders.py` measures the gain.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.errors import LowRankError, check_number, require
from lowrank_cnn.core.files import is_regular, replacing
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, decode_image, image_header, scale_shorter
from lowrank_cnn.data.sources import open_data
from lowrank_cnn.data.store import ImageStore
from lowrank_cnn.data.streamed import StreamedSplit
from lowrank_cnn.data.types import Bad, Problems, check_workers, generator
from lowrank_cnn.data.workers import loaded

PER_SHARD = 4096
_ROW_GROUP = 100
_JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Shards(Dataset):
    """Shards to write, each from a run of the rows; an item lists the bad images of one shard."""

    store: ImageStore
    rows: Tensor
    channels: int
    names: tuple[str, ...]
    folder: Path
    split: str
    side: int
    quality: int
    per_shard: int

    def __len__(self) -> int:
        return ceil_div(len(self.rows), self.per_shard)

    def __getitem__(self, number: int) -> list[tuple[str, str]]:
        path = self.folder / f"{self.split}-{number:05d}-of-{len(self):05d}.parquet"
        if is_regular(path):
            return []  # it is complete, since it is renamed last
        found: list[tuple[str, str]] = []
        rows = []
        for row in self.rows[number * self.per_shard : (number + 1) * self.per_shard].tolist():
            try:
                image = shrunk(self.store.read(row), self.channels, self.side, self.quality)
                rows.append({"image": {"bytes": image, "path": None}, "label": int(self.store.labels[row])})
            except BadImageError as error:
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
        _write(path, rows, self.names)
        return found


def shrink(
    source: str | Path,
    out: str | Path,
    *,
    side: int = 256,
    quality: int = 95,
    workers: int = 0,
    per_shard: int = PER_SHARD,
    missing: Bad = "refuse",
) -> dict[str, Problems]:
    """Write both splits of a set into the folder `out`, except shards that exist; returns the problems found."""
    check_workers(workers)
    check_number("side", side, least=1, whole=True)
    check_number("per_shard", per_shard, least=1, whole=True)
    check_number("quality", quality, least=1, most=100, whole=True)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    data = open_data(source, missing=missing, resident_bytes=0)
    make = partial(Shards, names=data.classes, folder=out, side=side, quality=quality, per_shard=per_shard)
    problems = {}
    for name, split in (("train", data.train), ("test", data.test)):
        if not isinstance(split, StreamedSplit):
            raise LowRankError(f"{source} is held in memory as it is: there is nothing to shrink.")
        # Sorted by class, as folders are, each shard would hold few classes.
        rows = split.store.shuffled_rows(split.rows, generator("shrink"))
        shards = make(split.store, rows, split.channels, split=name)
        for found in loaded(DataLoader(shards, batch_size=None, num_workers=workers)):
            split.problems.add_all(found)
        problems[name] = split.problems
    return problems


def shrunk(data: bytes, channels: int, side: int, quality: int) -> bytes:
    """The image at this shorter side as a JPEG; a JPEG that is no larger stays as it is."""
    size, _ = image_header(data)
    if data.startswith(_JPEG) and min(size) <= side:
        return data
    image = decode_image(data, channels=channels, at_least=side)
    image = scale_shorter(image, side) if min(image.size) > side else image
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _write(path: Path, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    pa = require("pyarrow", extra="data", purpose="writing parquet")
    pq = require("pyarrow.parquet", extra="data", purpose="writing parquet")
    features = {"label": {"names": list(names), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary, row_group_size=_ROW_GROUP)
