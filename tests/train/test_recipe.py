"""Recipes and settings are plain values: they travel through JSON and text, and bad ones are named."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import RECIPES, Recipe
from lowrank_cnn.train.recipe import RunSettings, changed, differences, parse_settings, within
from lowrank_cnn.train.recipes import defaults_for, get_recipe, suited


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json_and_the_command_line(name):
    recipe = RECIPES[name]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    settings = [
        f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for field, value in recipe.to_dict().items()
    ]
    assert lr.get_recipe("modern", **parse_settings(settings)) == recipe


@given(rate=st.floats(1e-12, 10), epochs=st.integers(1, 1000), drops=st.lists(st.integers(1, 500), max_size=5))
def test_overrides_are_read_as_their_types(rate, epochs, drops):
    text = {"lr": repr(rate), "epochs": str(epochs), "drop_epochs": ",".join(map(str, drops))}
    recipe = lr.get_recipe("modern", **text)
    assert (recipe.lr, recipe.epochs, recipe.drop_epochs) == (rate, epochs, tuple(drops))


def test_words_are_understood():
    recipe = lr.get_recipe("nin-paper", crop="none", mirror="no", nesterov="yes", norm="batch", output=1)
    assert (recipe.crop, recipe.mirror, recipe.nesterov, recipe.norm) == (None, False, True, "batch")
    assert recipe.output == "1"
    assert lr.get_recipe("modern", freeze=["features.*", "stem.*"]).freeze == "features.*, stem.*"
    settings = changed(RunSettings(), {"compile": "auto", "workers": "3", "deterministic": "true"})
    assert (settings.compile, settings.workers, settings.deterministic) == (None, 3, True)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"momentun": 0.9}, "no field 'momentun': did you mean momentum"),
        ({"lr": "fast"}, "lr wants a value of type float, not 'fast'"),
        ({"batch_size": "12.5"}, "batch_size wants a value of type int"),
        ({"batch_size": "inf"}, "batch_size wants a value of type int, not 'inf'"),
        ({"freeze": 0.5}, "freeze wants a value of type str, not"),
        ({"freeze": ["features.*", None]}, "freeze wants a value of type str, not"),
        ({"lr": "inf"}, "lr lies between 1e-12"),
        ({"lr": "nan"}, "lr lies between 1e-12"),
        ({"momentum": 1}, "momentum lies between 0"),
        ({"dropout": 1}, "dropout lies between 0"),
        ({"batch_size": 0}, "batch_size lies between 1"),
        ({"zoom": 0.0}, "zoom lies between"),
        ({"drop_epochs": "5 0"}, "drop_epochs are numbers of epochs, 1 or more, not 0"),
        ({"drop_epochs": "a,b"}, "drop_epochs wants"),
        ({"mirror": "perhaps"}, "mirror wants a value of type bool"),
        ({"schedule": "linear"}, "schedule is one of paper, poly, cosine, triangle, constant"),
        ({"optimizer": "adam"}, "optimizer is one of sgd, adamw, muon"),
        ({"auto_augment": "all"}, "auto_augment is one of none, trivial, rand"),
        ({"momentum": 0, "nesterov": True}, "nesterov needs a momentum"),
        ({"batch_size": 128, "accumulate": 3}, "does not part into accumulate=3"),
        ({"early_stop": 3}, "set holdout"),
        ({"early_stop": 3, "holdout": 0.1, "levels": 2}, "clear early_stop or levels"),
        ({"lookahead": 5, "ema": 0.9}, "lookahead and ema both average weights"),
        ({"alternate_mirror": True, "mirror": False}, "set mirror=True as well"),
        ({"levels": 2}, "watches held-out training images"),
        ({"levels": 2, "holdout": 0.1, "drop_epochs": "5"}, "levels finds the drops"),
    ],
)
def test_bad_values_are_named(overrides, sentence):
    with pytest.raises(LowRankError, match=sentence):
        lr.get_recipe("modern", **overrides)


def test_mistakes_in_names_are_answered_with_the_nearest():
    with pytest.raises(LowRankError, match="did you mean nin-paper"):
        lr.get_recipe("nin-papr")
    with pytest.raises(LowRankError, match="field=value"):
        parse_settings(["lr"])


def test_recipes_differ_in_what_they_teach():
    one, other = (
        lr.get_recipe("nin-paper").to_dict(),
        lr.get_recipe("nin-paper", lr=0.1, evaluate_every=7).to_dict(),
    )
    assert differences(one, other) == {"lr": (0.2, 0.1)}
    del one["pool"]  # as in a record from before there was one
    assert differences(one, lr.get_recipe("nin-paper").to_dict()) == {}
    assert differences(one, lr.get_recipe("nin-paper", pool="average").to_dict()) == {"pool": (None, "average")}


def test_the_published_hyper_parameters():
    vgg, nin, googlenet = (RECIPES[name] for name in ("vgg-paper", "nin-paper", "googlenet-paper"))
    assert (vgg.batch_size, vgg.momentum, vgg.weight_decay, vgg.lr) == (256, 0.9, 5e-4, 0.01)
    assert (vgg.schedule, nin.schedule, nin.preprocess, nin.crop) == ("paper", "paper", "whiten", 30)
    assert (googlenet.schedule, googlenet.power, googlenet.aux_weight) == ("poly", 0.5, 0.3)


@dataclass(frozen=True)
class WithNewField(Recipe):
    """Step 1 of "Add a recipe field" in CONTRIBUTING.md: one line declares a field."""

    shake: float = within(0.0, 0, 1, fixed=True)


def test_one_line_declares_a_field(driver, tmp_path):
    """The declaration alone gives the limits, the text of --set, JSON, the record, and the rule for resuming."""
    assert "shake" in {field.name for field in fields(WithNewField)}
    recipe = changed(WithNewField(batch_size=16, epochs=1), {"shake": "0.5"})
    assert WithNewField.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    with pytest.raises(LowRankError, match="shake lies between 0 and 1, not at 2"):
        changed(recipe, {"shake": 2})
    _, record = driver.train(tmp_path, recipe)
    assert record.recipe["shake"] == 0.5
    (tmp_path / "record.json").unlink()
    with pytest.raises(LowRankError, match=r"started with shake=0\.5, and cannot go on with 0\.1"):
        driver.train(tmp_path, changed(recipe, {"shake": 0.1, "epochs": 2}), resume=True)


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "rate"),
    [(5, 5, 200, 0.02), (300, 16, 120, 0.04), (963, 32, 70, 0.05), (5_000, 128, 60, 0.1), (10**6, 128, 30, 0.1)],
)
def test_defaults_come_from_the_number_of_images(images: int, batch: int, epochs: int, rate: float) -> None:
    found = defaults_for(images)
    assert (found.batch_size, found.epochs, found.lr) == (batch, epochs, rate)
    assert differences(found.to_dict(), get_recipe("modern").to_dict()).keys() <= {"batch_size", "epochs", "lr"}


def test_networks_of_layer_norms_are_trained_by_adamw() -> None:
    modern, norms = get_recipe("modern"), nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm([4, 6, 6]))
    found = suited(modern, 5_000, norms, given=())
    assert (found.optimizer, found.lr, found.weight_decay, found.nesterov) == ("adamw", 0.002, 0.05, False)
    assert suited(modern, 5_000, norms.append(nn.BatchNorm2d(4)), given=()).optimizer == "sgd"
    asked = suited(modern, 5_000, norms[:2], given=("optimizer", "lr"))
    assert (asked.optimizer, asked.lr) == (modern.optimizer, modern.lr)


def test_without_a_recipe_fit_chooses_what_is_not_given(driver, capsys) -> None:
    net, data = driver.tiny_net(stateful=True), driver.tiny_data()
    options = {"pad": 1, "cutout": 0, "device": "cpu"}
    chosen = lr.fit(net, data, epochs=1, **options).recipe
    assert (chosen["batch_size"], chosen["epochs"], chosen["lr"]) == (16, 1, 0.04)
    assert "80 images: batches of 16, 1 epoch, rate 0.04, 5 steps in all.\n" in capsys.readouterr().out
    held = lr.fit(net, data, epochs=1, batch_size=32, holdout=20, **options).recipe
    assert (held["batch_size"], held["lr"]) == (32, 0.05)
    assert "60 images: batches of 32, " in capsys.readouterr().out
    named = lr.fit(net, data, "digits", epochs=1, crop=8, **options).recipe
    assert (named["batch_size"], named["lr"]) == (64, 0.1)
    assert "80 images:" not in capsys.readouterr().out
