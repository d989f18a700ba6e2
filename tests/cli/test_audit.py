"""The command audit, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowrank_cnn.cli.show import console
from lowrank_cnn.core.errors import LowRankError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 200 columns."""
    monkeypatch.setattr(console, "_width", 200)


def test_the_tables_fit_eighty_columns(output_of):
    assert max(map(len, output_of("audit").splitlines())) <= 80


def test_accuracies_of_runs_are_compared_with_the_published_ones(output_of):
    findings = json.loads(output_of("audit", "--runs", RESULTS / "paper", "--json"))
    verdicts = {
        f["subject"]: f["verdict"] for f in findings if f["table"] == "nin-cifar10" and f["quantity"] == "top1"
    }
    assert verdicts == dict.fromkeys(("nin", "nin-c3", "nin-c3-lr"), "reproduced")


def test_the_notes_are_those_of_the_counts(output_of, wide):
    shown = output_of("audit", "--runs", RESULTS / "paper")
    assert "91.65%" in shown
    assert "standard deviation" not in shown.partition("Notes")[2]


def test_runs_that_test_nothing_and_files_that_cannot_be_read_are_named(lowrank, tmp_path):
    (tmp_path / "damaged.json").write_text("{")
    done = lowrank("audit", "--runs", RESULTS / "modern-equal-compute", "--runs", tmp_path)
    assert "No accuracy is tested by what is here, 3 runs" in done.stderr
    assert "damaged.json" in done.stderr
    (tmp_path / "damaged.json").unlink()
    for empty in ("nowhere", tmp_path):
        assert isinstance(lowrank("audit", "--runs", empty).exception, LowRankError)


def test_an_accuracy_that_was_not_reached_is_shown(output_of, wide, tmp_path):
    values = json.loads((RESULTS / "paper" / "nin-seed1" / "record.json").read_text())
    values["result"]["top1"] = 0.85
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert "not reached " in output_of("audit", "--runs", tmp_path)


def test_everything_has_a_verdict(output_of):
    findings = json.loads(output_of("audit", "--json"))
    assert len(findings) > 100
    assert all(finding["verdict"] for finding in findings)
