"""Read columns of parquet files within a memory limit, whatever the files claim.

A few hundred bytes of parquet can stand for gigabytes: equal values are stored once. Labels are therefore decoded
piece by piece, and images are left in the form in which the file stores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import regular

MOST_ROWS = 3 * 10**7
"""Images of one split: twice those of ImageNet-21k."""
MOST_SHARDS = 10**5
LARGEST_GROUP = 2**30
"""Bytes of the images in one row group, as the file states them."""
READ_ERRORS = (OSError, ValueError, NotImplementedError, LookupError, TypeError)
"""What pyarrow's errors derive from, but for those of memory."""
_BATCH_ROWS = 2**16


def check_rows(rows: int, path: Path) -> None:
    """Refuse more rows than any set of images has."""
    if not 0 <= rows <= MOST_ROWS:
        raise LowRankError(f"{path} claims {rows:,} rows; at most {MOST_ROWS:,} images of a split are read.")


def read_integers(file: Any, name: str, *, missing: int) -> Tensor:
    """A column of integers as int64, `missing` where a row has none."""
    rows = file.metadata.num_rows
    found = torch.empty(rows, dtype=torch.int64)
    done = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[name], use_threads=False):
        values = batch.column(0).cast("int64").fill_null(missing).to_numpy(zero_copy_only=False)
        if done + len(values) > rows:
            raise ValueError("it has more rows than it says")
        found[done : done + len(values)] = torch.from_numpy(values.copy())
        done += len(values)
    return found[:done]


def read_binaries(path: Path, name: str, group: int) -> Any:
    """The images of a row group as an array of bytes; None where they exceed the bound.

    Values that are stored once stay so: as a dictionary, they take the memory that the file says they take.
    """
    pq = require("pyarrow.parquet", extra="data", purpose="reading parquet")
    with pq.ParquetFile(regular(path), read_dictionary=[name]) as file:
        metadata = file.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema == name]
        if not sizes or sizes[0] > LARGEST_GROUP:
            return None
        column = file.read_row_group(group, columns=[name], use_threads=False).column(0).combine_chunks()
    return column.field("bytes") if hasattr(column, "field") else column
