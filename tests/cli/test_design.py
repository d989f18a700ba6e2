"""`lowrank design` prints what was measured, and its advice."""

from __future__ import annotations

import json

from lowrank_cnn.cli.app import run

SMALL = ["nin", "--width", "0.1", "--input", "3x16x16", "--device", "cpu"]


def test_advice_for_people_and_programs(capsys):
    assert run(["design", *SMALL, "--macs", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "features.conv1_1" in shown
    assert "Measured on cpu in torch" in shown
    assert run(["design", *SMALL, "--macs", "0.5", "--json"]) == 0
    assert {"verdict", "choice", "layers", "forms"} <= json.loads(capsys.readouterr().out).keys()


def test_wrong_wishes_get_one_sentence(capsys):
    for options, words in (
        (["--macs", "2"], "up to 1"),
        ([], "needs a budget"),
        (["--macs", "0.5", "--data", "digits"], "trained network"),
    ):
        assert run(["design", *SMALL, *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
