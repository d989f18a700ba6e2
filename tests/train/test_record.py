"""Records read back what was written, and foreign files are told apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.record import NOT_WRITTEN, Record, load_record


def sample() -> Record:
    return Record({"name": "nin"}, {"lr": 0.1}, {"name": "digits"}, 3, "test", "fp32", "cpu")


def stored() -> dict:
    """As records were stored before they were sealed."""
    values = dataclasses.asdict(sample())
    for name in NOT_WRITTEN:
        del values[name]
    return values


def test_a_record_reads_back(tmp_path):
    sample_record = sample()
    sample_record.save(tmp_path / "record.json")
    assert load_record(tmp_path) == load_record(tmp_path / "record.json") == sample_record


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Record, Path, bytes]:
    record, path = sample(), tmp_path_factory.mktemp("record") / "record.json"
    record.save(path)
    return record, path, path.read_bytes()


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=300)
def test_a_flipped_bit_is_noticed_or_changes_nothing(written, where, bit):
    record, path, content = written
    flipped = bytearray(content)
    flipped[int(where * len(flipped))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        found = load_record(path)
    except LowRankError:
        return
    assert found == record
    assert found.sealed


def test_a_changed_record_says_how_to_use_it_all_the_same(tmp_path):
    path = tmp_path / "record.json"
    sample().save(path)
    values = json.loads(path.read_text()) | {"seed": 4}
    path.write_text(json.dumps(values))
    with pytest.raises(LowRankError, match=r"damaged or was edited.*delete its field sha256"):
        load_record(path)
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert load_record(path).seed == 4
    assert not load_record(path).sealed


def test_fields_of_another_type_are_refused(tmp_path):
    for name, value in {"model": "nin", "seed": "3", "history": {}, "status": [1], "result": None}.items():
        (tmp_path / "record.json").write_text(json.dumps(stored() | {name: value}))
        with pytest.raises(LowRankError, match=f"{name} is not"):
            load_record(tmp_path)


def test_lone_surrogates_come_back(tmp_path):
    record = sample()
    record.model["name"] = "\ud800"
    record.save(tmp_path / "record.json")
    assert load_record(tmp_path) == record


def test_older_records_lack_what_came_later_and_nothing_else(tmp_path):
    values = stored()
    del values["begun_from"]
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert load_record(tmp_path).begun_from == ""
    del values["seed"]
    (tmp_path / "record.json").write_text(json.dumps(values))
    with pytest.raises(LowRankError, match="seed missing or unknown"):
        load_record(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "timing"}, "not the record of a training run"),
        ({"schema": 99}, "schema 99"),
        ({"surprise": 1}, "surprise"),
        ({"status": "lost"}, "status 'lost'"),
    ],
)
def test_foreign_records_are_refused(tmp_path, change, sentence):
    (tmp_path / "record.json").write_text(json.dumps(stored() | change))
    with pytest.raises(LowRankError, match=sentence):
        load_record(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\ufffd"])
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(LowRankError, match="not the record"):
        load_record(tmp_path)


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(LowRankError, match="no record"):
        load_record(tmp_path)
