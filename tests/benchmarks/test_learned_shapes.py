"""Learned shapes beside their rivals, in miniature: a record that is continued, and verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def learned_shapes(benchmark_module):
    return benchmark_module("learned_shapes")


def test_ways_are_trained_in_turn_and_judged(learned_shapes, tmp_path: Path, capsys):
    out = tmp_path / "shapes.json"
    common = ["--data", "digits", "--limit", "32", "--network", "nin", "--width", "0.05", "--recipe", "digits"]
    common += [
        "--set",
        "epochs=2",
        "--set",
        "batch_size=16",
        "--set",
        "crop=16",
        "--macs",
        "0.6",
        "--multiple",
        "1",
    ]
    common += ["--device", "cpu", "--seeds", "1", "--out", str(out)]
    learned_shapes.main([*common, "--budget", "0", "--ways", "thin"])
    assert "the same command continues" in capsys.readouterr().out
    learned_shapes.main([*common, "--ways", "thin", "again", "gates"])
    record = json.loads(out.read_text())
    assert [row["way"] for row in record["rows"]] == ["thin", "proximal", "again", "gates"]
    learned_shapes.main([*common, "--macs", "0.05", "--ways", "strips", "--out", str(tmp_path / "least.json")])
    assert "strips is left out: macs=0.05 is below" in capsys.readouterr().out
    assert record["rows"][1]["shapes"] == record["rows"][2]["shapes"]
    assert all(row["macs"] <= 0.62 for row in record["rows"])
    assert {(one["ours"], one["theirs"]) for one in record["answers"]} == {
        ("proximal", "thin"), ("again", "thin"), ("gates", "thin"),
    }  # fmt: skip
    assert all(one["margin"] == 0.5 for one in record["answers"])
