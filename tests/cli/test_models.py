"""The commands models, count and recipes, as a user types them."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

from lowrank_cnn.cli import app
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import RECIPES


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))


def without_convs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def test_count_prints_the_published_integers_as_json(output_of):
    printed = json.loads(output_of("count", "vgg11-gmp-lr", "--convention", "paper", "--json"))
    assert (printed["model"], printed["convention"]) == ("vgg11-gmp-lr", "paper")
    assert (printed["macs"], printed["params"]) == (2518134440, 26054888)
    assert printed["input"] == [3, 224, 224]
    assert printed["layers"][0]["name"] == "features.conv1_1"


def test_count_takes_any_network(output_of, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 9, 3, padding=1))\n")
    dense, low_rank = (
        json.loads(output_of("count", f"{own}:net", "--input", "3x8x8", "--json", *more))["macs"]
        for more in ([], ["--scheme", "lr"])
    )
    assert (dense, low_rank) == (9 * 27 * 64, 9 * 9 * 64)
    for more, says in (((), "give --input"), (("--width", "2"), "width can be set for our own")):
        with pytest.raises(LowRankError, match=says):
            output_of("count", f"{own}:net", *more)


@pytest.mark.parametrize(
    "arguments", [["models"], ["recipes"], ["count", "vgg11-gmp-lr-join"], ["count", "googlenet-lr-conv1"]]
)
def test_tables_fit_eighty_columns(output_of, arguments: list[str]):
    shown = output_of(*arguments)
    assert "conv3_reduce " in shown or "googlenet-lr-conv1" not in arguments
    assert max(map(len, shown.splitlines())) <= 80


def test_models_lists_costs_and_accuracy_as_json(output_of):
    rows = {row["network"]: row for row in json.loads(output_of("models", "--json"))}
    assert len(rows) == 22
    assert rows["airbench"]["top1"] is None
    assert rows["nin-c3-lr"]["macs"] == 104260224
    assert rows["vgg11"]["top5"] == 0.8617


def test_recipes_are_listed_with_every_field_as_json(output_of):
    assert all(name in output_of("recipes") for name in RECIPES)
    assert json.loads(output_of("recipes", "--json"))["modern"]["lr"] == RECIPES["modern"].lr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["count", "vgg12"], "did you mean vgg11"),
        (["count", "vgg11", "--input", "224x224"], "CHANNELSxHEIGHTxWIDTH"),
        (["count", "vgg11", "--input", "3x64x64"], "takes 224x224 images"),
        (["count", "nin", "--scheme", "mixture(kx1"], "cannot read the scheme"),
        (["count", "nin", "--convention", "flops"], "convention is mac or paper"),
        (["count", "nin", "--width", "-1"], "width must be a number above 0"),
        (["count", "nin", "--input", "3x1x1"], "nin takes images of 4x4 at least"),
        (["convert", __file__], "names no network"),
        (["convert", f"{__file__}:scripted", "--input", "3x8x8"], "the model is scripted"),
        (["convert", f"{__file__}:without_convs", "--input", "3x8x8"], "Sequential has no convolutions"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], says: str, capsys):
    assert app.run(arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert says in done.err
    assert len(done.err.strip().splitlines()) == 1
