"""Records read back what was written, and foreign files are told apart."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.record import Record, load_record


def sample() -> Record:
    return Record({"name": "nin"}, {"lr": 0.1}, {"name": "digits"}, 3, "test", "fp32", "cpu")


def test_a_record_reads_back(tmp_path):
    sample_record = sample()
    sample_record.save(tmp_path / "record.json")
    assert load_record(tmp_path) == load_record(tmp_path / "record.json") == sample_record


def test_older_records_lack_what_came_later_and_nothing_else(tmp_path):
    values = dataclasses.asdict(sample())
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
    (tmp_path / "record.json").write_text(json.dumps(dataclasses.asdict(sample()) | change))
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
