"""The command shrink, as a user types it."""

from __future__ import annotations

import json

import pytest


def test_photographs_are_stored_smaller_and_bad_ones_named(output_of, tmp_path):
    image = pytest.importorskip("PIL.Image")
    parquet = pytest.importorskip("pyarrow.parquet")
    photos, small = tmp_path / "photos", tmp_path / "small"
    (photos / "train" / "cat").mkdir(parents=True)
    for number in range(3):
        image.new("RGB", (80, 60), (number, 90, 9)).save(photos / "train" / "cat" / f"{number}.jpg")
    (photos / "train" / "cat" / "broken.jpg").write_bytes(b"no image")
    printed = json.loads(output_of("shrink", photos, small, "--side", "32", "--json"))
    shards = list(small.glob("*.parquet"))
    assert printed["bytes"] == sum(shard.stat().st_size for shard in shards)
    assert sum(sum(counts.values()) for counts in printed["problems"].values()) == 1
    assert sum(parquet.read_table(shard).num_rows for shard in shards) == 3
    assert f"lowrank train NETWORK --data {small}" in output_of("shrink", photos, small).replace("\n", "")
