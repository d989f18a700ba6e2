"""The commands report and figure, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowrank_cnn.report.figures import FIGURES

RECORD = {
    "kind": "training",
    "model": {"name": "nin-c3-lr", "num_classes": 10},
    "data": {"name": "digits", "image": [3, 30, 30]},
    "recipe": {"name": "fast"},
    "history": [{"epoch": 1, "train_loss": 1.0, "accuracy": 0.5}],
    "result": {"top1": 0.5, "macs": 10, "params": 5},
    "status": "finished",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "record.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_report_finds_the_folder_runs_and_says_where_the_page_is(lowrank, folder: Path):
    (folder / "runs" / "cut.json").write_text("{")
    done = lowrank("report")
    assert done.exit_code == 0
    assert "Wrote report.html: 1 training run." in done.stdout
    assert "Skipped runs/cut.json: it is not JSON" in done.stderr
    assert "nin-c3-lr" in (folder / "report.html").read_text()


def test_a_page_goes_through_the_users_own_link_and_to_standard_output(lowrank, folder: Path):
    (folder / "www").mkdir()
    (folder / "latest.html").symlink_to(folder / "www" / "page.html")
    assert "Wrote latest.html" in lowrank("report", "-o", "latest.html").stdout
    page = (folder / "www" / "page.html").read_text()
    done = lowrank("report", "-o", "-")
    assert (done.exit_code, done.stdout.startswith("<!doctype html>")) == (0, True)
    assert len(done.stdout) == pytest.approx(len(page), abs=200)  # a date
    assert "</svg>" in lowrank("figure", "vgg", "-o", "-").stdout
    assert (folder / "latest.html").is_symlink()
    assert not (folder / "-").exists()


def test_report_as_json(lowrank, folder: Path):
    (folder / "runs" / "foreign.json").write_text("[]")
    done = lowrank("report", "runs", "-o", "deep/page.html", "--json")
    printed = json.loads(done.stdout)
    assert (printed["page"], printed["runs"], printed["skipped"]) == ("deep/page.html", 1, [])
    assert (folder / "deep" / "page.html").exists()


def test_figures_are_listed(lowrank):
    done = lowrank("figure")
    assert all(name in done.stdout for name in FIGURES)
    assert [row["figure"] for row in json.loads(lowrank("figure", "--json").stdout)] == list(FIGURES)


def test_a_figure_is_written_under_its_own_name(lowrank, folder: Path):
    pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert")
    assert "Wrote nin.svg." in lowrank("figure", "nin", "--runs", "runs").stdout
    assert (folder / "nin.svg").read_text().startswith("<svg")
    printed = json.loads(lowrank("figure", "connections", "-o", "c.png", "--json").stdout)
    assert printed == {"figure": "connections", "file": "c.png"}


def test_what_a_plot_leaves_out_is_said(lowrank, folder: Path):
    pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert")
    committed = Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10"
    said = lowrank("figure", "nin", "--runs", committed, "-o", "a.svg").stderr
    assert "nin-c3-lr, torch init, no norm by nin-init" in said
    assert "nin-paper" not in said
    assert lowrank("figure", "curves", "--runs", committed, "-o", "b.svg").stderr == ""
