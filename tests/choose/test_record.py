from __future__ import annotations

import pytest
import torch

from lowrank_cnn.choose.candidates import find_design
from lowrank_cnn.choose.frontier import ANSWERS, RECORD, in_words, load_frontier, open_frontier, pack
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.recipe import Recipe

TWO = {"dense": (0.9, 1.0, 2), "lr": (0.8, 0.5, 3)}


def test_a_record_reads_back_as_it_was(make_frontier):
    found = make_frontier(TWO)
    again = load_frontier(found.folder)
    assert again == found
    answers = again.right_answers(again.rows[1])
    assert answers.sum(1).tolist() == [run.correct for run in found.rows[1].runs]


def test_answers_that_were_changed_on_disk_are_refused(make_frontier):
    found = make_frontier(TWO)
    path = found.folder / ANSWERS
    content = bytearray(path.read_bytes())
    content[3 * found.bytes_per_run + 5] ^= 4
    path.write_bytes(bytes(content))
    assert found.right_answers(found.rows[0]).shape == (2, found.images)
    with pytest.raises(LowRankError, match="row 3 is not what was written"):
        found.right_answers(found.rows[1])


def test_answers_of_a_run_that_never_came_into_the_record_are_written_over(make_frontier):
    found = make_frontier(TWO)
    lost = pack(torch.ones(found.images, dtype=torch.bool))
    assert found.add_answers(lost) == found.add_answers(lost)
    assert (found.folder / ANSWERS).stat().st_size == 6 * found.bytes_per_run
    with pytest.raises(LowRankError, match="not the answers for 1,003 test images"):
        found.add_answers(lost[1:])


def test_seconds_are_those_of_runs_that_had_the_device_alone(make_frontier):
    row = make_frontier(TWO).rows[0]
    assert row.seconds == 3.0
    row.runs[0].seconds, row.runs[1].seconds = None, 7.0
    assert row.seconds == 7.0
    row.runs[1].seconds = None
    assert row.seconds is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"family": "nin", "recipe": {"lr": 1}},
            r"whose family is airbench, not nin: choose another out\.$",
        ),
        ({"teacher": "dense"}, "whose teacher is none, not dense: choose"),
        ({"data": {"name": "photos"}}, "whose data name is cifar10, not photos: choose"),
    ],
)
def test_a_folder_of_another_frontier_is_refused(make_frontier, change, says):
    found = make_frontier(TWO)
    assert open_frontier(found.folder, found.about, found.images) == found
    with pytest.raises(LowRankError, match=says):
        open_frontier(found.folder, {**found.about, **change}, found.images)


def test_what_is_no_record_is_refused(make_frontier):
    found = make_frontier(TWO)
    whole = (found.folder / RECORD).read_text()
    for text in (whole.replace('"seed": 2', '"seed": 3', 1), whole[:-20]):
        (found.folder / RECORD).write_text(text)
        with pytest.raises(LowRankError, match="is damaged"):
            load_frontier(found.folder)
    (found.folder / RECORD).write_text('{"kind": "frontier", "schema": 1}')
    with pytest.raises(LowRankError, match="not the record of a frontier"):
        load_frontier(found.folder)
    with pytest.raises(LowRankError, match="no record of a frontier"):
        load_frontier(found.folder / "elsewhere")


def test_a_recipe_without_fields_that_came_later_is_the_same(make_frontier):
    whole = Recipe().to_dict()
    found = make_frontier(TWO)
    found.about["recipe"] = {name: value for name, value in whole.items() if name not in ("quantize", "output")}
    found.save()
    assert open_frontier(found.folder, {**found.about, "recipe": whole}, found.images).rows == found.rows
    with pytest.raises(LowRankError, match="whose recipe quantize is none, not int8: choose"):
        open_frontier(found.folder, {**found.about, "recipe": {**whole, "quantize": "int8"}}, found.images)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dense@0.90625", "thin at 0.91"),
        ("dense-64s-branches@0.75", "thin at 0.75 in 64s with branches"),
        ("dense-3x3@0.875", "thin 3x3 at 0.88"),
        ("lr@1.5", "lr at 1.5"),
        ("bands", "bands"),
    ],
)
def test_a_design_is_named_in_words(name: str, words: str):
    assert in_words(find_design(name)) == words
