"""A recipe is plain values that travel through JSON unchanged, and bad ones are named."""

from __future__ import annotations

import json

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.recipe import Recipe, changed, differences
from lowrank_cnn.train.recipes import RECIPES, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name):
    recipe = RECIPES[name]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"momentun": 0.9}, "no field 'momentun': did you mean momentum"),
        ({"lr": "fast"}, "lr wants a value of type float, not 'fast'"),
        ({"batch_size": "12.5"}, "batch_size wants a value of type int"),
        ({"batch_size": "inf"}, "batch_size wants a value of type int, not 'inf'"),
        ({"batch_size": "nan"}, "batch_size wants a value of type int, not 'nan'"),
        ({"lr": "inf"}, "lr lies between 1e-12"),
        ({"lr": 0}, "lr lies between 1e-12"),
        ({"momentum": 1}, "momentum lies between 0"),
        ({"label_smoothing": 1}, "label_smoothing lies between 0"),
        ({"drop_epochs": "5 0"}, "drop_epochs are numbers of epochs, 1 or more, not 0"),
        ({"mirror": "perhaps"}, "mirror wants a value of type bool"),
        ({"drop_epochs": "a,b"}, "drop_epochs wants"),
        ({"schedule": "linear"}, "schedule is one of paper, poly, cosine, triangle, constant"),
        ({"dropout": 1}, "dropout lies between 0"),
        ({"batch_size": 0}, "batch_size lies between 1"),
        ({"lr": "nan"}, "lr lies between 1e-12"),
        ({"momentum": 0, "nesterov": True}, "nesterov needs a momentum"),
        ({"levels": 2}, "watches held-out training images"),
        ({"levels": 2, "holdout": 0.1, "drop_epochs": "5"}, "levels finds the drops"),
    ],
)
def test_bad_values_are_named(overrides, sentence):
    with pytest.raises(LowRankError, match=sentence):
        get_recipe("modern", **overrides)


def test_what_is_not_changed_stays():
    recipe = RECIPES["nin-paper"]
    assert changed(recipe, {"lr": "0.05"}) == Recipe.from_dict(recipe.to_dict() | {"lr": 0.05})
    assert changed(recipe, {}) == recipe


def test_recipes_differ_in_what_they_teach():
    one, other = get_recipe("nin-paper").to_dict(), get_recipe("nin-paper", lr=0.1, evaluate_every=7).to_dict()
    assert differences(one, other) == {"lr": (0.2, 0.1)}
    del one["pool"]  # as in a record from before there was one
    assert differences(one, get_recipe("nin-paper").to_dict()) == {}
    assert differences(one, get_recipe("nin-paper", pool="average").to_dict()) == {"pool": (None, "average")}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optimizer": "adam"}, "optimizer is one of sgd, adamw, muon"),
        ({"auto_augment": "all"}, "auto_augment is one of none, trivial, rand"),
        ({"class_weights": "equal"}, "class_weights is one of none, balanced"),
        ({"batch_size": 128, "accumulate": 3}, "does not part into accumulate=3"),
        ({"early_stop": 3}, "set holdout"),
        ({"early_stop": 3, "holdout": 0.1, "levels": 2}, "clear early_stop or levels"),
        ({"zoom": 0.0}, "zoom lies between"),
    ],
)
def test_options_of_today_are_checked(fields, says):
    with pytest.raises(LowRankError, match=says):
        Recipe(**fields)
