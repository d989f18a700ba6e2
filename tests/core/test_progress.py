"""A call that takes more than two seconds says on standard error what it does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import lowrank_cnn as lr
from lowrank_cnn.core import progress as module
from lowrank_cnn.core.progress import fitting, lasting, progress, step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test moves it; `ring` is what happens after two seconds."""
    fake = SimpleNamespace(now=0.0, ring=[])

    class Timer:
        def __init__(self, _seconds, show):
            fake.ring = [show]

        def start(self):
            fake.started = True

        def cancel(self):
            fake.ring = []

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    monkeypatch.setattr(module, "threading", SimpleNamespace(Timer=Timer, Lock=module.threading.Lock))
    return fake


@progress("inner")
def inner() -> None:
    step("block 2 of 3")


def test_a_log_gets_lines_after_two_seconds_and_not_too_many(clock, capsys):
    with progress("outer"):
        step("folded")
        assert capsys.readouterr().err == ""
        clock.now = 2.0
        clock.ring[0]()
        step("\x1b[2Jplanned")
        clock.now = 12.0
        inner()
        step("the end")
    assert capsys.readouterr().err == "outer: folded ...\nouter: \\x1b[2Jplanned: block 2 of 3 ...\n"
    assert clock.ring == []


def test_a_terminal_and_a_notebook_show_one_line_that_vanishes(clock, capsys, monkeypatch):
    monkeypatch.setattr(module, "moves", lambda _: True)
    with progress("thin"):
        clock.now = 3.0
        step("width 0.25")
        step("one")
        lasting("ncnn: 2.71 ms")
        step("two")
    shown = capsys.readouterr().err
    assert shown.split("\r") == [
        "", "thin: width 0.25 ...", "thin: one ...       ", " " * 13, "ncnn: 2.71 ms\n",
        "thin: two ...", " " * 13, "",
    ]  # fmt: skip


def test_what_the_user_gives_gets_every_step_at_once_and_nothing_is_shown(clock, capsys):
    said: list[str] = []
    with progress("outer", said.append):
        step("planned")
        inner()
    step("outside of all calls")
    assert said == ["planned", "planned: block 2 of 3"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["optimize", "plan", "thin", "prune", "decompose", "design", "export", "quantize"]
)
def test_calls_that_may_take_long_show_progress(name: str, monkeypatch):
    """Each begins a line, whatever else is wrong with what it is given."""
    begun: list[str] = []
    monkeypatch.setattr(module.StepLine, "__init__", lambda self, what, say: begun.append(what))
    monkeypatch.setattr(module.StepLine, "close", lambda self: None)
    monkeypatch.setattr(module.StepLine, "steps", [""], raising=False)
    net = lr.create_model("nin", width=0.1).eval()
    call = {
        "thin": lambda: lr.thin(net, macs=0.0, input_size=(3, 8, 8)),
        "prune": lambda: lr.prune(net, macs=0.0, input_size=(3, 8, 8)),
        "quantize": lambda: lr.quantize(net, 0, 0),
    }
    with pytest.raises(Exception):  # noqa: B017, PT011
        call.get(name, lambda: getattr(lr, name)(net, None))()
    assert begun == [name]


def test_a_line_that_is_too_long_loses_its_middle():
    line = "train: epoch 3 of 20, batch 120 of 400, 93.5 s left ..."
    assert fitting(line, 60) == line
    short = fitting(line, 40)
    assert (len(short), short.startswith("train: epoch 3"), short.endswith("93.5 s left ...")) == (40, True, True)
    assert fitting(line, 1) == "."
