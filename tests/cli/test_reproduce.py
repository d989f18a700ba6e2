"""The command reproduce, as a user types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.loop import Trainer

SMALL = ("--set", "width=0.05", "--set", "epochs=1", "--set", "crop=28", "--set", "batch_size=16")
RUN = ("reproduce", "cifar10", "--data", "digits", "--limit", "64", "--part", "modern", "--device", "cpu", *SMALL)


def lowrank(*arguments: object):
    return CliRunner().invoke(build(), [str(a) for a in arguments])


def test_shares_of_an_experiment_and_their_table(tmp_path):
    for network in ("nin-c3", "nin-c3-lr"):
        done = lowrank(*RUN, "--network", network, "--seeds", 1, "--out", tmp_path, "--no-weights")
        assert done.exit_code == 0, done.output
    assert f"The report: {tmp_path / 'report.html'}" in done.output.replace("\n", "")
    assert "nin-c3-lr" in (tmp_path / "report.html").read_text()
    assert "1 of 1 pair of" in done.output or "0 of 1 pair of" in done.output
    assert "Not begun" not in done.output  # of what was asked for
    assert "Not begun: 37 runs" in lowrank("reproduce", "cifar10", "--out", tmp_path, "--table").output
    figures = json.loads(lowrank("reproduce", "cifar10", "--out", tmp_path, "--table", "--json").stdout)
    assert [row["network"] for row in figures["rows"]] == ["nin-c3", "nin-c3-lr"]
    assert figures["report"] == str(tmp_path / "report.html")
    assert figures == json.loads((tmp_path / "table.json").read_text()) | {
        "report": figures["report"],
        "environment": figures["environment"],
    }


def test_gaps_are_shown_with_their_verdict(tmp_path):
    done = lowrank(*RUN, "--network", "nin", "--network", "nin-c3-lr", "--seeds", 2, "--out", tmp_path)
    assert "nin-c3-lr matches nin" in done.output
    assert any(verdict in done.output for verdict in ("holds", "does not hold", "undecided"))


def test_the_table_of_nothing_is_empty(tmp_path):
    done = lowrank("reproduce", "tiny-imagenet", "--out", tmp_path, "--table")
    assert done.exit_code == 0
    assert "Not begun: 22 runs, the first paper/vgg11-seed1." in done.output
    assert not (tmp_path / "report.html").exists()


def test_training_without_images_is_refused(tmp_path):
    error = lowrank("reproduce", "cifar10", "--out", tmp_path).exception
    assert isinstance(error, LowRankError)
    assert "give --data, or --table" in str(error)


def test_names_are_checked_before_images_are_read(tmp_path, monkeypatch):
    def open_(*_, **__):
        raise AssertionError("the images were opened")

    monkeypatch.setattr("lowrank_cnn.data.open_data", open_)
    for words, says in (
        (["cifra"], "did you mean cifar10"),
        (["cifar10", "--part", "papr"], "did you mean paper"),
    ):
        error = lowrank("reproduce", *words, "--data", "digits", "--out", tmp_path).exception
        assert isinstance(error, LowRankError)
        assert says in str(error)
    assert lowrank("reproduce", "cifar10", "--data", "digits", "--seeds", "0", "--out", tmp_path).exit_code == 2


def test_a_table_of_no_folder_is_refused(tmp_path):
    error = lowrank("reproduce", "cifar10", "--table", "--out", tmp_path / "typo").exception
    assert isinstance(error, LowRankError)
    assert not (tmp_path / "typo").exists()


def test_a_part_alone_leaves_the_table_of_all(tmp_path):
    lowrank(*RUN, "--network", "nin", "--seeds", 1, "--out", tmp_path)
    before = (tmp_path / "table.json").read_text()
    shown = lowrank("reproduce", "cifar10", "--table", "--part", "paper", "--out", tmp_path)
    assert shown.exit_code == 0
    assert (tmp_path / "table.json").read_text() == before


def test_ctrl_c_leaves_with_130_and_the_same_command_goes_on(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("experiment", ["ilsvrc", "places", "tiny-imagenet", "cifar10"])
def test_every_experiment_can_be_asked_for_its_table(tmp_path, experiment):
    assert lowrank("reproduce", experiment, "--out", tmp_path, "--table", "--json").exit_code == 0
