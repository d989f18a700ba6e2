import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_examples import CONVERTED, HERE, RUN, TIMING

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.report import read_records
from lowrank_cnn.report.charts import layer_charts, training_curves
from lowrank_cnn.report.page import cards, summary_table
from lowrank_cnn.report.reading import read_record, require_records, shown_elsewhere
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.results import gather
from lowrank_cnn.report.trade import trade_charts, trade_points


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1, 2], "plain JSON"),
        ({"items": []}, "no kind"),
        ({"kind": "shopping"}, "'shopping' has no training run"),
        ({"kind": "training"}, "names no network"),
        ({"kind": "training", "model": {"name": ["x"]}}, "names no network"),
        ({"kind": "timing", "name": "nin"}, "without any time"),
    ],
)
def test_what_is_no_record_is_refused_in_one_sentence(values: object, says: str):
    with pytest.raises(LowRankError, match=says):
        read_record(values, HERE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


FIELDS = ["name", "size", "width", "stride", "ms", "top1", "n", "macs", "dense", "conversion", "config", "class"]


def mutated(record: dict) -> st.SearchStrategy[dict]:
    """A record with some of its fields, at the top or one below, replaced by anything."""
    inner = [key for key, value in record.items() if isinstance(value, dict)]
    top = st.dictionaries(st.sampled_from(sorted(record)), JSON, max_size=3)
    fields = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2)
    deep = st.tuples(st.sampled_from(inner), fields)
    keys = st.fixed_dictionaries({"kind": st.just(record["kind"])})
    return st.tuples(top, deep, keys).map(
        lambda parts: {**record, parts[1][0]: {**record[parts[1][0]], **parts[1][1]}, **parts[0], **parts[2]}
    )


@settings(max_examples=40)
@given(st.lists(mutated(RUN) | mutated(CONVERTED) | mutated(TIMING), max_size=4))
def test_whatever_a_record_holds_the_page_can_be_made(found: list[dict]):
    records, refusals = Records(), []
    for values in found:
        try:
            for record in read_record(json.loads(json.dumps(values)), HERE):
                records.add(record)
        except LowRankError as error:
            refusals.append(str(error))
    assert all(len(refusal.splitlines()) == 1 for refusal in refusals)
    entries = gather(records)
    assert len(summary_table(entries).rows) == len(entries)
    cards(entries)
    charts = [trade_charts(trade_points(entries)), training_curves(entries), layer_charts(records.timings)]
    json.dumps(charts, allow_nan=False)


def test_a_folder_is_read_at_any_depth_and_bad_files_are_listed(runs: Path):
    records = read_records([runs])
    assert (len(records.runs), len(records.timings)) == (15, 6)
    reasons = {Path(problem.path).name: problem.reason for problem in records.skipped}
    assert set(reasons) == {"cut.json", "foreign.json", "binary.json"}
    assert "not JSON" in reasons["cut.json"]
    assert "shopping list" in reasons["foreign.json"]


def test_a_frontier_is_shown_by_its_own_command(tmp_path: Path):
    (tmp_path / "frontier.json").write_text(json.dumps({"kind": "frontier", "family": "nin"}))
    shown = f"{tmp_path / 'frontier.json'} is shown by `lowrank frontier nin --out {tmp_path}`"
    records = read_records([tmp_path])
    assert (records.skipped, shown_elsewhere(records)) == ([], [shown])
    with pytest.raises(LowRankError, match=r"no training run and no timing of a network; .*lowrank frontier nin"):
        require_records([tmp_path], records)


def test_the_other_files_of_a_run_are_no_problem(tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(RUN))
    for name in ("recipe.json", "shape_costs.json", "shapes.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "step-00000010.json").write_text("{}")
    (tmp_path / "step-00000010.safetensors").write_bytes(b"")
    (tmp_path / "table.json").write_text('{"kind": "reproduction", "rows": []}')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    records = read_records([tmp_path])
    assert (len(records.runs), records.skipped) == (1, [])


def test_a_file_may_hold_several_records_and_is_read_once(tmp_path: Path):
    file = tmp_path / "all.json"
    file.write_text(json.dumps([RUN, TIMING, {"kind": "?"}]))
    records = read_records([tmp_path, file])
    assert (len(records.runs), len(records.timings), len(records.skipped)) == (1, 2, 1)


def test_a_path_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(LowRankError, match=r"no file or folder .*nowhere"):
        read_records([tmp_path / "nowhere"])
