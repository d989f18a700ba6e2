"""Long work is seen, short work is not."""

from __future__ import annotations

import io
import sys

import pytest

from lowrank_cnn.data import store as image_progress
from lowrank_cnn.data.store import ImageProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with ImageProgress("Decoding images", 100) as shown:
        shown.advance(100)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("enabled", "rank"), [(False, "0"), (True, "1")])
def test_it_can_be_switched_off_and_only_the_first_process_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], enabled: bool, rank: str
) -> None:
    monkeypatch.setattr(image_progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("RANK", rank)
    with ImageProgress("Decoding images", 100, enabled=enabled) as shown:
        shown.advance(1)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(image_progress, "QUIET_SECONDS", 0.0)
    with ImageProgress("Decoding images", 1000) as shown:
        for _ in range(3):
            shown.advance(10)
    assert capsys.readouterr().err == "Decoding images: 1,000 images ...\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with ImageProgress("Decoding images", 40) as shown:
        shown.advance(30)
    assert "Decoding images" in terminal.getvalue()
    assert "30/40" in terminal.getvalue()
