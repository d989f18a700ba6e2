"""What the command prints: nothing in a name controls the terminal."""

from __future__ import annotations

import json

import pytest

from lowrank_cnn.cli.show import (
    console,
    continued_by_same_command,
    print_json,
    print_table,
)
from lowrank_cnn.train import Interrupted


def test_names_do_not_control_the_terminal(capsys):
    console.print("\x1b[2Jcat", markup=False)
    print_table("\x1b]0;title\x07", ["class"], [["\x9b2J"]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2Jcat" in shown


def test_tables_align_numbers_to_the_right_and_show_markup_as_it_is(capsys):
    print_table("Title", ("name", "n", "<note"), [("[b]a", 5, "x"), ("b", 12345, None)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert " [b]a     5 x" in lines
    assert " b    12345" in lines


def test_a_title_is_as_wide_as_the_terminal_and_not_as_its_table(capsys):
    print_table("Each class, the worst first", ("n",), [(1,)])
    assert capsys.readouterr().out.splitlines()[0] == "Each class, the worst first"


def test_json_is_plain(capsys):
    print_json({"a": [1, 2]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, 2]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
def test_ctrl_c_says_how_to_continue(error: type[KeyboardInterrupt]):
    """Between two runs of this process, or while other processes train, it is a plain KeyboardInterrupt."""
    with pytest.raises(Interrupted, match="the same command continues from here"), continued_by_same_command():
        raise error
