from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def common(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("common")


def test_a_record_says_what_it_was_measured_with(common: ModuleType, tmp_path: Path):
    path = tmp_path / "new" / "a.json"
    common.write_record(path, "memory", rows=[1])
    found = json.loads(path.read_text())
    assert (found["kind"], found["rows"]) == ("memory", [1])
    assert found["environment"]["torch"]
    rows = [{"network": "a", "n": [1, 2]}, {"network": "b", "n": []}]
    common.write_record(path, "memory", by_line="rows", rows=rows, environment={"cpu": "other"})
    found = json.loads(path.read_text())
    assert (found["environment"], found["rows"]) == ({"cpu": "other"}, rows)
    assert path.read_text().count('\n  {"network"') == 2  # a line for each row


def test_runs_are_kept_and_other_records_refused(common: ModuleType, tmp_path: Path):
    path = tmp_path / "runs.json"
    assert common.earlier_runs(path, "speed") == []
    common.write_runs(path, "speed", [{"ms": 1}])
    assert common.earlier_runs(path, "speed") == [{"ms": 1}]
    with pytest.raises(SystemExit, match="no record of runs of memory"):
        common.earlier_runs(path, "memory")


def test_the_record_of_a_benchmark_lies_among_the_results(common: ModuleType):
    made = common.parser("Why.\n\n    how", "x.json")
    assert made.parse_args([]).out == common.RESULTS / "x.json"
    assert "    how" in made.format_help()


def test_spreads(common: ModuleType):
    assert common.rates([3, 1, 2]) == {"images_per_second": 2, "lowest": 1, "highest": 3}
    assert common.milliseconds([3, 1, 2]) == {"ms": 2, "least": 1, "most": 3}
