"""What a run shows on a terminal, in a notebook, and elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from lowrank_cnn.train.progress import Lines, Live, NotebookLine, Progress, moving_line
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
        "epoch 2/10  loss 1.2500  train 50.0%  accuracy 62.50%  lr 0.05  12,500 images/s\n"
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


def test_the_line_moves_on_a_terminal_and_in_a_notebook(monkeypatch):
    assert moving_line() is None
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert moving_line() is NotebookLine
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert moving_line() is Live


def test_a_notebook_shows_one_output_with_the_time_left(monkeypatch, capsys):
    display = pytest.importorskip("IPython.display")
    shown = []

    class Output:
        def update(self, data, *, raw):
            shown.append((data["text/plain"], raw))

    monkeypatch.setattr(display, "display", lambda *_, **__: Output())
    line = NotebookLine(total=100, per_epoch=10, start=0)
    with line:
        for iteration in (5, 10, 15):
            line.step(Tally(50.0, 25.0, 100.0, 5, False), 0.05, iteration)
        line.epoch(ROW, 10)
    (*moving, last), raws = zip(*shown, strict=True)
    assert all(raws)
    assert last == ""
    assert "epoch 2/10" in moving[-1]
    assert "accuracy 25.0%" in moving[-1]
    assert re.search(r" \d:\d\d:\d\d$", moving[-1])  # plain text, without codes for colours
    assert capsys.readouterr().out.startswith("epoch 2/10  loss 1.2500")


def test_silence_is_the_default(capsys):
    with Progress() as silent:
        silent.say("nothing")
        silent.epoch(ROW, 10)
        silent.step(Tally(0, 0, 0, 0, False), 0.1, 1)
    assert capsys.readouterr().out == ""
