"""Options from a file: TOML or JSON, behind what is typed, and nothing that is no option."""

from __future__ import annotations

import json

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import load_record

pytestmark = pytest.mark.usefixtures("squares")

TOML = """
model = "nin-c3-lr"
data = "squares"
width = 0.05
epochs = 1
batch-size = 16
device = "cpu"
compile = false

[recipe]
crop = 14
lr = 0.03
momentum = 0.5
"""


def test_a_file_says_it_all_and_the_command_line_comes_first(lowrank, tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    done = lowrank("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "a")
    assert done.exit_code == 0, (done.output, done.exception)
    recipe = load_record(tmp_path / "a").recipe
    assert (recipe["lr"], recipe["momentum"], recipe["crop"], recipe["batch_size"]) == (0.03, 0.5, 14, 16)
    typed = ("--lr", "0.01", "--set", "momentum=0.7", "--batch-size", "8")
    lowrank("train", "nin", "--config", tmp_path / "run.toml", "--out", tmp_path / "b", *typed)
    record = load_record(tmp_path / "b")
    assert (record.recipe["lr"], record.recipe["momentum"], record.recipe["crop"]) == (0.01, 0.7, 14)
    assert (record.recipe["batch_size"], record.model["name"]) == (8, "nin")


def test_json_will_do(lowrank, tmp_path):
    options = {"model": "nin", "data": "squares", "width": 0.05, "epochs": 1, "batch_size": 16, "device": "cpu"}
    (tmp_path / "run.json").write_text(json.dumps({**options, "recipe": {"crop": 14}}))
    assert lowrank("train", "--config", tmp_path / "run.json").exit_code == 0


@pytest.mark.parametrize("text", ['recipe = "digits"', '[recipe]\nname = "digits"'])
def test_a_recipe_is_named_in_the_file(lowrank, tmp_path, text):
    options = TOML.partition("[recipe]")[0].replace("epochs = 1", 'log = "csv"\nset = ["epochs=1", "crop=14"]')
    (tmp_path / "run.toml").write_text(f"{options}\n{text}")
    done = lowrank("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "a")
    assert done.exit_code == 0, (done.output, done.exception)
    recipe = load_record(tmp_path / "a").recipe
    assert (recipe["name"], recipe["pad"], recipe["mirror"]) == ("digits", 2, False)
    assert (tmp_path / "a" / "history.csv").exists()
    other = lowrank("train", "--config", tmp_path / "run.toml", "--recipe", "modern", "--out", tmp_path / "b")
    assert other.exit_code == 0, (other.output, other.exception)
    assert load_record(tmp_path / "b").recipe["name"] == "modern"
    named = lowrank("train", "--config", tmp_path / "run.toml", "--set", "name=modern")
    assert "--recipe modern, not with --set" in str(named.exception)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = ", "is not TOML or JSON"),
        ("model = " + "[" * 10_000, "is not TOML or JSON: maximum recursion depth"),
        ("recipe = 3", "a table .recipe."),
        ("widht = 2", "sets 'widht', which is no option: did you mean width"),
        ("config = 'x'", "sets 'config', which is no option"),
        ("[recipe]\nlrr = 1", "no field 'lrr'"),
        ("[recipe]\nlr = 'x'", "lr wants a value of type float"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(lowrank, tmp_path, text, says):
    (tmp_path / "run.toml").write_text(text)
    error = lowrank("train", "nin", "--data", "squares", "--config", tmp_path / "run.toml").exception
    assert isinstance(error, LowRankError), error
    with pytest.raises(LowRankError, match=says):
        raise error
