"""What a run shows on a terminal, in a notebook and elsewhere, and what loggers get (clients are stand-ins)."""

from __future__ import annotations

import csv
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.core.progress import moves
from lowrank_cnn.train import load_record
from lowrank_cnn.train.progress import Live
from lowrank_cnn.train.run_folder import Epoch
from lowrank_cnn.train.step import Tally

ROW = Epoch(2, 0.05, 1.25, 0.5, 0.625, 4.0, 12_500.0)


def test_one_line_per_epoch_where_there_is_no_terminal(driver, capsys):
    driver.train(None, driver.PLAIN, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  loss ")
    assert "images/s" in lines[0]
    driver.train(None, driver.PLAIN, progress=False)
    assert capsys.readouterr().out == ""


def test_the_live_line_names_every_figure_and_the_time_left(capsys):
    live = Live(total=100, per_epoch=10, start=5)
    with live:
        live.began -= 10  # ten seconds for ten steps
        live.step(Tally(50.0, 25.0, 100.0, 5, False), 0.05, 15)
        live.epoch(ROW, 10)
    moving, shown = capsys.readouterr().out.split("\r", 3)[1::2]
    for part in ("epoch 2/10", "loss 0.500", "accuracy 25.0%", "lr 0.05", "images/s", "85 s left"):
        assert part in moving
    assert shown.startswith("epoch 2/10  loss 1.2500  train 50.0%  accuracy 62.50%")


def test_a_narrow_terminal_shows_fewer_parts_each_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    live = Live(total=100, per_epoch=10, start=5)
    live.began -= 10
    live.step(Tally(50.0, 25.0, 100.0, 5, False), 0.05, 15)
    assert capsys.readouterr().out.strip() == "epoch 2/10  85 s left  loss 0.500  accuracy 25.0%  lr 0.05"


def test_the_line_moves_on_a_terminal_and_in_a_notebook(monkeypatch):
    assert not moves(sys.stdout)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert moves(sys.stdout)
    stream = type("OutStream", (), {"__module__": "ipykernel.iostream", "isatty": lambda self: False})
    monkeypatch.setattr("sys.stdout", stream())
    assert moves(sys.stdout)


Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the client was called with."""
    heard: Calls = []

    def hear(name: str, answer: object = None):
        def call(*values: Any, **options: Any) -> object:
            heard.append((name, {**options, "values": values}))
            return answer

        return call

    wandb = ModuleType("wandb")
    run = SimpleNamespace(id="w1", log=hear("wandb.log"), finish=hear("wandb.finish"))
    wandb.init = hear("wandb.init", run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return heard


def of(calls: Calls, name: str) -> list[dict[str, Any]]:
    return [options for called, options in calls if called == name]


def test_scalars_for_tensorboard(driver, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, record = driver.train(tmp_path, driver.PLAIN, log="tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"lr", "train_loss", "accuracy"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2, 3]
    assert events.Scalars("test_top1")[0].value == pytest.approx(record.result["top1"])


def test_a_client_gets_the_run_its_epochs_and_its_result(driver, tmp_path, calls):
    _, record = driver.train(tmp_path, driver.PLAIN, log="wandb")
    (begun,) = of(calls, "wandb.init")
    assert begun["config"]["recipe"]["lr"] == record.recipe["lr"]
    assert (begun["project"], begun["name"]) == ("lowrank-cnn", tmp_path.name)
    logged = of(calls, "wandb.log")
    assert [call["step"] for call in logged] == [1, 2, 3, 3]
    assert logged[0]["values"][0]["train_loss"] == record.history[0]["train_loss"]
    assert logged[-1]["values"][0]["test_top1"] == record.result["top1"]
    assert of(calls, "wandb.finish") == [{"exit_code": 0, "values": ()}]


def test_a_run_that_is_resumed_continues_where_its_logs_stopped(driver, tmp_path, calls):
    def stop(row: Epoch, network: object) -> None:
        if row.epoch == 2:
            raise RuntimeError("cut")

    names = ("csv", "wandb")
    with pytest.raises(RuntimeError, match="cut"):
        driver.train(tmp_path, driver.PLAIN, log=names, callbacks=[stop], checkpoint_every=0)
    assert of(calls, "wandb.finish")[0]["exit_code"] == 1
    driver.train(tmp_path, driver.PLAIN, log=names, resume=True)
    assert of(calls, "wandb.init")[1]["id"] == "w1"
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    history = load_record(tmp_path).history
    assert [float(row["train_loss"]) for row in rows] == [row["train_loss"] for row in history]
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]


def test_a_client_that_is_not_installed_is_named(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"log='wandb' needs wandb: pip install '\.\[wandb\]'"):
        driver.train(None, driver.PLAIN, log="wandb")


def test_a_client_that_cannot_start_is_one_sentence(driver, calls, monkeypatch):
    def refuse(**options: Any) -> None:
        raise ValueError("No API key configured.\nA second line.")

    monkeypatch.setattr("wandb.init", refuse)
    with pytest.raises(LowRankError, match=r"^log='wandb' could not start: No API key configured\.$"):
        driver.train(None, driver.PLAIN, log="wandb")


def test_a_server_that_goes_away_does_not_end_the_run(driver, tmp_path, calls, monkeypatch, capsys):
    def lost(values: Any, step: int) -> None:
        if step == 2:
            raise ConnectionError("server lost")

    run = sys.modules["wandb"].init()
    monkeypatch.setattr(run, "log", lost)
    _, record = driver.train(tmp_path, driver.PLAIN, log=("wandb", "csv"), progress=True)
    assert len(record.history) == 3
    assert "Logging to wandb stopped (server lost)." in capsys.readouterr().out
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 4
    assert of(calls, "wandb.finish") == []


def test_mistakes_are_one_sentence(driver):
    with pytest.raises(LowRankError, match="logger must be tensorboard or csv or wandb"):
        driver.train(None, driver.PLAIN, log="wandbb")
    for name in ("csv", "tensorboard"):
        with pytest.raises(LowRankError, match="give out"):
            driver.train(None, driver.PLAIN, log=name)
