"""Tables of paths and labels, and files of class names: what is wrong with one gets a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.folders import open_table, read_class_names, renamed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not nothing"),
        ("a,b\n1,2\n", "columns path and label.*not a, b"),
        ("path,label\nx.png\n", "line 2 of .* has no path or no label"),
        ("path,label\nx.png,\n", "line 2 of .* has no path or no label"),
        ("path,label,split\nx.png,a,test\n", "lists no image to train on"),
        ("path,label\n\ufeff", "line 2"),
        (f"path,label\n{'x' * 2**18},a\n", "cannot be read as a table: field larger than field limit"),
        ("path,label,split\nx.png,a,train\ny.png,a,trian\n", "line 3 of .* the split 'trian': did you mean train"),
    ],
)
def test_damaged_tables(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(LowRankError, match=says):
        open_table(tmp_path / "t.csv")


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_spreadsheets_part_columns_by_other_marks(tmp_path: Path, mark: str) -> None:
    for name in ("x.png", "y.png"):
        (tmp_path / name).touch()
    lines = [("path", "label", "split"), ("x.png", '"a\nb"', "train"), ("y.png", "c", "val")]
    (tmp_path / "t.csv").write_text("\n".join(map(mark.join, lines)))
    found = open_table(tmp_path / "t.csv")
    assert (found.classes, len(found.train.paths)) == (("a\nb", "c"), 1)
    assert found.test is not None


def test_a_file_to_train_on_is_not_tested_on(tmp_path: Path) -> None:
    for name in ("x.png", "y.png"):
        (tmp_path / name).touch()
    (tmp_path / "t.csv").write_text("path,label,split\nx.png,a,train\n./x.png,a,test\ny.png,b,test\n")
    found = open_table(tmp_path / "t.csv")
    assert found.test is not None
    assert [Path(file).name for file in found.test.paths] == ["y.png"]
    assert found.problems["test"].examples == {"file to train on": ["./x.png"]}


def test_text_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff.png,a\n")
    with pytest.raises(LowRankError, match="is not UTF-8 text"):
        open_table(tmp_path / "t.csv")


def test_class_names_from_json_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n01": "tench", "n02": "shark, white"}')
    (tmp_path / "a.txt").write_text("n01\ttench\n\nn02\tshark, white\n")
    names = {"n01": "tench", "n02": "shark, white"}
    assert read_class_names(tmp_path / "a.json") == read_class_names(tmp_path / "a.txt") == names
    assert renamed(("n00", "n01"), names, tmp_path) == ("n00", "tench")


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{"), ("a.json", "[1]"), ("a.txt", "alone\n"), ("a.txt", "")]
)
def test_files_of_no_class_names(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LowRankError, match=r"is not JSON|a class and its name in each line"):
        read_class_names(tmp_path / name)
    with pytest.raises(LowRankError, match="cannot be read"):
        read_class_names(tmp_path / "none")


def test_names_that_say_nothing_or_one_thing_twice(tmp_path: Path) -> None:
    with pytest.raises(LowRankError, match="two classes the name 'x'"):
        renamed(("a", "b"), {"a": "x", "b": "x"}, tmp_path)
    with pytest.raises(LowRankError, match="names none of the classes, such as 'a'"):
        renamed(("a", "b"), {"c": "x"}, tmp_path)


def test_of_test_and_val_lines_the_test_lines_are_tested_on(tmp_path: Path) -> None:
    for name in ("x.png", "y.png", "z.png"):
        (tmp_path / name).touch()
    (tmp_path / "t.csv").write_text("path,label,split\nx.png,a,train\ny.png,a,val\nz.png,a,test\n")
    found = open_table(tmp_path / "t.csv")
    assert found.test is not None
    assert [Path(file).name for file in found.test.paths] == ["z.png"]
    assert found.tested == ("test", "val")
