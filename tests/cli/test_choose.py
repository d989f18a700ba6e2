"""The commands design and frontier, in miniature."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lowrank_cnn.choose import trace
from lowrank_cnn.choose.frontier import load_frontier


def test_design_has_advice_for_people_and_programs(output_of):
    small = ("design", "nin", "--width", "0.1", "--input", "3x16x16", "--device", "cpu", "--macs", "0.5")
    shown = output_of(*small)
    assert "features.conv1_1" in shown
    assert "Measured on cpu in torch" in shown
    assert {"verdict", "choice", "layers", "forms"} <= json.loads(output_of(*small, "--json")).keys()


SMALL = ("--data", "digits", "--limit", "64", "--base", "0.25", "--seeds", "1", "--device", "cpu")
SMALL += ("--set", "epochs=1", "--set", "batch_size=32", "--set", "crop=12", "--batch", "2", "--no-compile")


def test_frontier_writes_a_record_and_a_picture(output_of, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "PROCESSES", 0)  # they take their time
    asked = ("frontier", "airbench", "--out", tmp_path, *SMALL, "--repeats", 3, "--design", "lr")
    found = json.loads(output_of(*asked, "--match", "none", "--json"))
    assert [row["design"] for row in found["rows"]] == ["dense", "lr"]
    assert all(row["ms"] > 0 and len(row["accuracies"]) == 1 for row in found["rows"])
    assert {"frontier.json", "answers.bits", "frontier.svg"} <= {path.name for path in tmp_path.iterdir()}
    record = load_frontier(tmp_path)
    for row in record.rows:
        assert row.runs[0].correct == int(record.right_answers(row).sum())
        assert row.runs[0].seconds > 0
    before = (tmp_path / "frontier.json").stat()
    again = output_of("frontier", "airbench", "--out", tmp_path)
    assert "airbench (width 0.25) on digits" in again
    assert "lr" in again
    assert (tmp_path / "frontier.json").stat().st_mtime_ns == before.st_mtime_ns  # to look at it changes nothing


def test_a_record_is_shown_with_its_verdicts_and_what_weakens_them(output_of, tmp_path):
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "frontier" / "cifar10-nin-rivals"
    for name in ("frontier.json", "answers.bits"):
        shutil.copy(record / name, tmp_path)
    text = " ".join(output_of("frontier", "nin", "--out", tmp_path).split())
    assert "yes *" in text
    assert "* dense-3x3@0.875, with fewer MACs, is 0.71 points above dense-64s@0.75." in text
