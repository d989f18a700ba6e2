"""Numbers and tables as a person reads them, and foreign text that a terminal does not obey."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lowrank_cnn
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.text import counted, duration, printable, si, text_table


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
    assert [counted(2, noun) for noun in ("class", "batch", "epoch")] == ["2 classes", "2 batches", "2 epochs"]


def test_messages_leave_the_ending_of_nouns_to_counted():
    nouns = (
        "batches|classes|dimensions|epochs|images|inputs|labels|layers|networks|outputs|runs|seeds|stages|variants"
    )
    bare = re.compile(rf"{{len\([^{{}}]*\)(:,)?}} ({nouns})\b|'s' \*|\"s\" \*")
    sources = Path(lowrank_cnn.__file__).parent.rglob("*.py")
    assert [
        f"{path}: {line}" for path in sources for line in path.read_text().splitlines() if bare.search(line)
    ] == []
