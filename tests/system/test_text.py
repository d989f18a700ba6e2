"""Numbers and tables as a person reads them, and foreign text that a terminal does not obey."""

from __future__ import annotations

import pytest

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted, duration, printable, si, text_table


@pytest.mark.parametrize(("number", "shown"), [(7508438696, "7.51G"), (999, "999"), (1e12, "1.00T"), (0.5, "0.5")])
def test_counts_have_units(number, shown):
    assert si(number) == shown


def test_times_have_units():
    assert [duration(seconds) for seconds in (3, 12.54, 600, 7200)] == ["3 s", "12.5 s", "10.0 min", "2.0 h"]


def test_columns_are_aligned():
    assert text_table(["a", ">n"], [["long", 1], ["b", 22]]) == "a      n\nlong   1\nb     22"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat", "cat"),
        ("\u00e9l\u00e8ve, \u732b, \U0001f408", "\u00e9l\u00e8ve, \u732b, \U0001f408"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x9b2J\r\x08", "\\x9b2J\\r\\x08"),
        ("\u202egpj.tac", "\\u202egpj.tac"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown
    assert str(LowRankError(text)) == shown.replace("\n", "\\n")


def test_a_noun_follows_its_number():
    assert [counted(n, "run") for n in (0, 1, 2, 12345)] == ["0 runs", "1 run", "2 runs", "12,345 runs"]
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]
