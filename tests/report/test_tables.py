from dataclasses import replace

from lowrank_cnn.paper.audit import VERDICTS, audit
from lowrank_cnn.report.page import audit_table, environment_table, published_table, runs_in_words, summary_table
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.results import gather


def test_a_table_without_top5_has_no_such_column(records: Records):
    few = [replace(run, top5=None) for run in records.runs]
    heads = [column.heading for column in summary_table(gather(Records(few))).columns]
    assert "top-5" not in heads
    assert "top-5" in [column.heading for column in summary_table(gather(records)).columns]


def test_runs_that_shared_a_device_have_no_comparable_time(records: Records):
    alone = [
        replace(run, environment={"date": f"2026-01-{i + 1:02}T00:00:00"}) for i, run in enumerate(records.runs)
    ]
    together = [replace(run, environment={"date": "2026-01-01T00:00:00"}) for run in records.runs]
    for runs, shared in ((alone, False), (together, True)):
        for row in summary_table(gather(Records(runs))).rows:
            assert (row[-1].small == "shared device") is shared
            assert (row[-1].value is None) is shared


def test_repeated_seeds_are_told(records: Records):
    twice = [run for run in records.runs if run.network.name == "nin" and run.seed == 0] * 2
    (result,) = gather(Records(twice))
    assert runs_in_words(result) == "2 runs of 1 seed"
    assert summary_table([result]).rows[0][1].small == ""


def test_the_audit_begins_with_disagreements():
    places = [row[0].value for row in audit_table(audit()).rows]
    assert places == sorted(places)
    assert VERDICTS[int(places[0])].startswith("contradicted")


def test_crops_are_named_beside_published_macs():
    notes = {row[0].shown: row[4].small for row in published_table().rows}
    assert notes["googlenet-10-crop"] == "10 crops: 15.9G"


def test_the_environment_shows_a_date_to_the_minute_and_a_short_commit(records: Records):
    table = environment_table(records, {"date": "2026-11-16T21:55:32+00:00", "commit": 4 * "0123456789"})
    shown = {row[0].shown: row[-1].shown for row in table.rows}
    assert shown["date"] == "2026-11-16 21:55"
    assert shown["commit"] == "012345678901"
