"""What a run shows on a terminal, elsewhere, and in charts."""

from __future__ import annotations

import io

import pytest

from lowrank_cnn.train.progress import Charts, Lines, Live, Progress
from lowrank_cnn.train.record import Epoch
from lowrank_cnn.train.step import Tally

ROW = Epoch(2, 0.05, 1.25, 0.5, 0.625, 4.0, 12_500.0)


def test_one_line_per_epoch_where_there_is_no_terminal(driver, capsys):
    driver.train(None, driver.PLAIN, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  loss ")
    assert "images/s" in lines[0]


def test_quiet_means_quiet(driver, capsys):
    driver.train(None, driver.PLAIN, progress=False)
    assert capsys.readouterr().out == ""


def test_an_epoch_in_one_line(capsys):
    Lines().epoch(ROW, 10)
    assert capsys.readouterr().out == (
        "epoch 2/10  loss 1.2500  train 50.00%  accuracy 62.50%  lr 0.05  12,500 images/s  4.0 s\n"
    )


def test_the_live_line_names_every_figure():
    from rich.console import Console

    screen = io.StringIO()
    live = Live(total=100, per_epoch=10, start=0)
    live.bar.live.console = Console(file=screen, force_terminal=True, width=120)
    with live:
        live.step(Tally(50.0, 25.0, 100.0, 5, False), 0.05, 15)
        live.bar.refresh()
        live.epoch(ROW, 10)
    shown = screen.getvalue()
    for part in ("epoch 2/10", "loss 0.500", "accuracy 25.0%", "lr 0.05", "images/s", "62.50%"):
        assert part in shown


def test_the_last_step_belongs_to_the_last_epoch():
    live = Live(total=20, per_epoch=10, start=0)
    for iteration, epoch in ((1, 1), (10, 1), (11, 2), (20, 2)):
        live.step(Tally(5.0, 5.0, 10.0, 1, False), 0.1, iteration)
        assert live.bar.tasks[0].description == f"epoch {epoch}/2"


def test_scalars_for_tensorboard(driver, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    driver.train(tmp_path, driver.PLAIN, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"lr", "train_loss", "accuracy"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2, 3]


def test_charts_pass_everything_on(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    with Charts(Lines(), tmp_path, epoch=0) as charts:
        charts.say("hello")
        charts.epoch(ROW, 10)
        assert not charts.due()
    assert capsys.readouterr().out.startswith("hello\nepoch 2/10")


def test_silence_is_the_default(capsys):
    with Progress() as silent:
        silent.say("nothing")
        silent.epoch(ROW, 10)
        silent.step(Tally(0, 0, 0, 0, False), 0.1, 1)
    assert capsys.readouterr().out == ""
