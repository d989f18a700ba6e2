"""Initialisations compared at each one's best rate, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.run_book import kept_answers


@pytest.fixture(scope="module")
def initialisation(benchmark_module):
    return benchmark_module("initialisation")


def test_rates_are_tried_on_held_out_images_and_full_runs_follow(initialisation, tmp_path: Path, capsys):
    out = tmp_path / "init.json"
    common = ["--data", "digits", "--limit", "40", "--network", "nin-c3-lr", "--width", "0.05"]
    common += ["--recipe", "digits"]
    common += ["--set", "batch_size=16", "--set", "crop=12", "--set", "norm=none", "--device", "cpu"]
    common += ["--out", str(out)]
    common += ["--epochs", "2", "--inits", "composite", "normal", "--rates", "0.01", "1e8", "--tries", "1"]
    initialisation.main([*common, "--seeds", "1"])
    record = json.loads(out.read_text())
    tries = [(row["init"], row["rate"]) for row in record["rows"] if row["phase"] == "try"]
    assert tries == [(init, rate) for rate in (0.01, 1e8) for init in ("composite", "normal")]
    assert next(row["images"] for row in record["rows"] if row["top1"] is not None) == 4  # held out
    assert all(row["diverged"] for row in record["rows"] if row["rate"] == 1e8)
    full = [row for row in record["rows"] if row["phase"] == "full"]
    assert [(row["init"], row["rate"], row["images"]) for row in full] == [
        ("composite", 0.01, 40), ("normal", 0.01, 40),
    ]  # fmt: skip
    assert all(row["diverged_try"] >= 1 for row in record["summary"])
    assert [one["margin"] for one in record["answers"]] == [0.2, 0.2]
    initialisation.main([*common, "--seeds", "1"])
    assert json.loads(out.read_text())["rows"] == record["rows"]  # nothing is trained again
    assert "composite over normal by 0.2" in capsys.readouterr().out


def test_tries_may_be_as_long_as_full_runs(initialisation, tmp_path: Path, monkeypatch):
    epochs: list[tuple[str, int]] = []

    def run(bench, init, rate, seed, *, full):
        epochs.append(("full" if full else "try", bench.recipe.epochs if full else bench.try_epochs))
        return {"top1": 0.5, "diverged": False, **kept_answers(torch.ones(4, dtype=torch.bool))}

    monkeypatch.setattr(initialisation.InitBench, "run", run)
    out = tmp_path / "init.json"
    common = ["--data", "digits", "--limit", "40", "--inits", "composite", "--rates", "1", "2", "--tries", "1"]
    initialisation.main([*common, "--seeds", "1", "--epochs", "6", "--try-epochs", "6", "--out", str(out)])
    assert epochs == [("try", 6), ("try", 6), ("full", 6)]
    assert json.loads(out.read_text())["about"]["try_epochs"] == 6
    with pytest.raises(SystemExit, match="other settings"):  # tries of another length do not mix with these
        initialisation.main([*common, "--seeds", "1", "--epochs", "6", "--out", str(out)])
