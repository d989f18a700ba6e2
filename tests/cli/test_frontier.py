"""`lowrank frontier` on the digits, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowrank_cnn.choose.frontier import load_frontier
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError

SMALL = ("--data", "digits", "--limit", "64", "--base", "0.25", "--seeds", "1", "--device", "cpu")
SMALL += ("--set", "epochs=1", "--set", "batch_size=32", "--set", "crop=12", "--batch", "2", "--no-compile")


def run(*arguments: object) -> str:
    done = CliRunner().invoke(build(), ["frontier", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_one_command_writes_a_record_and_a_picture(tmp_path: Path):
    asked = ("airbench", "--out", tmp_path, *SMALL, "--repeats", 3, "--design", "lr", "--match", "none")
    found = json.loads(run(*asked, "--json"))
    assert [row["design"] for row in found["rows"]] == ["dense", "lr"]
    assert all(row["ms"] > 0 and len(row["accuracies"]) == 1 for row in found["rows"])
    assert {"frontier.json", "answers.bits", "frontier.svg"} <= {path.name for path in tmp_path.iterdir()}
    record = load_frontier(tmp_path)
    for row in record.rows:
        assert row.runs[0].correct == int(record.right_answers(row).sum())
        assert row.runs[0].seconds > 0
    before = (tmp_path / "frontier.json").stat()
    again = run("airbench", "--out", tmp_path)
    assert "airbench (width 0.25) on digits" in again
    assert "lr" in again
    assert (tmp_path / "frontier.json").stat().st_mtime_ns == before.st_mtime_ns  # to look at it changes nothing


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("airbensh",), "no family"),
        (("airbench", "--design", "x"), "neither a design"),
        (("nin",), "no record"),
        (("nin", *SMALL, "--budget", "-1"), "budget, in seconds, must be a number above 0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str):
    with pytest.raises(LowRankError, match=sentence):
        run(*arguments, "--out", tmp_path)
