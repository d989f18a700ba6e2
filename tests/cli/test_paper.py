"""The commands audit and reproduce, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowrank_cnn.cli.show import console
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.loop import Trainer
from tests.cli.conftest import fits

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 200 columns."""
    monkeypatch.setattr(console, "_width", 200)


def test_the_tables_fit_eighty_columns(output_of):
    assert fits(output_of("audit"))


def test_accuracies_of_runs_are_compared_with_the_published_ones(output_of):
    findings = json.loads(output_of("audit", "--runs", RESULTS / "paper", "--json"))
    verdicts = {
        f["subject"]: f["verdict"] for f in findings if f["table"] == "nin-cifar10" and f["quantity"] == "top1"
    }
    assert verdicts == dict.fromkeys(("nin", "nin-c3", "nin-c3-lr"), "reproduced")


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


SMALL = ("--set", "width=0.05", "--set", "epochs=1", "--set", "crop=28", "--set", "batch_size=16")
RUN = ("reproduce", "cifar10", "--data", "digits", "--limit", "64", "--part", "modern", "--device", "cpu", *SMALL)


def test_shares_of_an_experiment_and_their_table(lowrank, tmp_path):
    for network in ("nin", "nin-c3-lr"):
        done = lowrank(*RUN, "--network", network, "--seeds", 2, "--out", tmp_path)
        assert done.exit_code == 0, done.output
    assert f"The report: {tmp_path / 'report.html'}" in done.output.replace("\n", "")
    assert "nin-c3-lr" in (tmp_path / "report.html").read_text()
    assert "1 of 1 pair of" in done.output or "0 of 1 pair of" in done.output
    assert "Not begun" not in done.output  # of what was asked for
    assert "Not begun: 35 runs" in lowrank("reproduce", "cifar10", "--out", tmp_path, "--table").output
    figures = json.loads(lowrank("reproduce", "cifar10", "--out", tmp_path, "--table", "--json").stdout)
    assert [row["network"] for row in figures["rows"]] == ["nin", "nin-c3-lr"]
    assert figures["report"] == str(tmp_path / "report.html")
    assert figures == json.loads((tmp_path / "table.json").read_text()) | {
        "report": figures["report"],
        "environment": figures["environment"],
    }
    assert "nin-c3-lr matches nin" in done.output
    assert any(verdict in done.output for verdict in ("holds", "does not hold", "undecided"))
    before = (tmp_path / "table.json").read_text()
    assert lowrank("reproduce", "cifar10", "--table", "--part", "paper", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "table.json").read_text() == before


def test_the_table_of_nothing_is_empty(lowrank, tmp_path):
    done = lowrank("reproduce", "tiny-imagenet", "--out", tmp_path, "--table")
    assert done.exit_code == 0
    assert "Not begun: 22 runs, the first paper/vgg11-seed1." in done.output
    assert not (tmp_path / "report.html").exists()


def test_ctrl_c_leaves_with_130_and_the_same_command_goes_on(lowrank, tmp_path, monkeypatch):
    look_around = Trainer._look_around

    def stop(self, request):
        request.received = True
        look_around(self, request)

    arguments = (*RUN, "--network", "nin", "--seeds", 1, "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_look_around", stop)
        stopped = lowrank(*arguments)
    assert stopped.exit_code == 130
    assert "the same command continues" in stopped.stderr
    assert "interrupted, 0 of 1 epoch" in lowrank("reproduce", "cifar10", "--out", tmp_path, "--table").stderr
    assert lowrank(*arguments).exit_code == 0
