"""Recipes are plain values that travel through JSON and the command line unchanged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.errors import LowRankError
from lowrank_cnn.train.recipe import RECIPES, Recipe, get_recipe, parse_settings


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name):
    recipe = RECIPES[name]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_can_be_set_by_its_text(name):
    recipe = RECIPES[name]
    settings = [
        f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for field, value in recipe.to_dict().items()
    ]
    assert get_recipe("modern", **parse_settings(settings)) == recipe


def test_the_published_hyper_parameters():
    vgg = RECIPES["vgg-paper"]
    assert (vgg.batch_size, vgg.momentum, vgg.weight_decay, vgg.lr) == (256, 0.9, 5e-4, 0.01)
    assert vgg.schedule == RECIPES["nin-paper"].schedule == "paper"
    googlenet = RECIPES["googlenet-paper"]
    assert (googlenet.schedule, googlenet.power, googlenet.aux_weight) == ("poly", 0.5, 0.3)
    assert RECIPES["nin-paper"].preprocess == "whiten"
    assert RECIPES["nin-paper"].crop == 30


@given(lr=st.floats(0, 10), epochs=st.integers(0, 1000), drops=st.lists(st.integers(0, 500), max_size=5))
def test_overrides_are_read_as_their_types(lr, epochs, drops):
    text = {"lr": repr(lr), "epochs": str(epochs), "drop_epochs": ",".join(map(str, drops))}
    recipe = get_recipe("modern", **text)
    assert (recipe.lr, recipe.epochs, recipe.drop_epochs) == (lr, epochs, tuple(drops))


def test_none_and_yes_are_understood():
    recipe = get_recipe("nin-paper", crop="none", mirror="no", nesterov="yes", norm="batch")
    assert (recipe.crop, recipe.mirror, recipe.nesterov, recipe.norm) == (None, False, True, "batch")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"momentun": 0.9}, "no field 'momentun': did you mean momentum"),
        ({"lr": "fast"}, "lr wants a value of type float, not 'fast'"),
        ({"batch_size": "12.5"}, "batch_size wants a value of type int"),
        ({"batch_size": "inf"}, "batch_size wants a value of type int, not 'inf'"),
        ({"batch_size": "nan"}, "batch_size wants a value of type int, not 'nan'"),
        ({"lr": "inf"}, "lr lies between 0"),
        ({"mirror": "perhaps"}, "mirror wants a value of type bool"),
        ({"drop_epochs": "a,b"}, "drop_epochs wants"),
        ({"schedule": "linear"}, "schedule is one of paper, poly, cosine, constant"),
        ({"batch_size": 0}, "batch_size lies between 1"),
        ({"lr": "nan"}, "lr lies between 0"),
        ({"momentum": 0, "nesterov": True}, "nesterov needs a momentum"),
        ({"levels": 2}, "watches held-out training images"),
    ],
)
def test_bad_values_are_named(overrides, sentence):
    with pytest.raises(LowRankError, match=sentence):
        get_recipe("modern", **overrides)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(LowRankError, match="did you mean nin-paper"):
        get_recipe("nin-papr")


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(LowRankError, match="field=value"):
        parse_settings(["lr"])
