"""Settings of the command line become the values that their fields want."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.recipe import parse_settings
from lowrank_cnn.train.recipes import RECIPES, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_can_be_set_by_its_text(name):
    recipe = RECIPES[name]
    settings = [
        f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for field, value in recipe.to_dict().items()
    ]
    assert get_recipe("modern", **parse_settings(settings)) == recipe


@given(lr=st.floats(1e-12, 10), epochs=st.integers(1, 1000), drops=st.lists(st.integers(1, 500), max_size=5))
def test_overrides_are_read_as_their_types(lr, epochs, drops):
    text = {"lr": repr(lr), "epochs": str(epochs), "drop_epochs": ",".join(map(str, drops))}
    recipe = get_recipe("modern", **text)
    assert (recipe.lr, recipe.epochs, recipe.drop_epochs) == (lr, epochs, tuple(drops))


def test_none_and_yes_are_understood():
    recipe = get_recipe("nin-paper", crop="none", mirror="no", nesterov="yes", norm="batch")
    assert (recipe.crop, recipe.mirror, recipe.nesterov, recipe.norm) == (None, False, True, "batch")


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(LowRankError, match="field=value"):
        parse_settings(["lr"])


def test_several_names_may_be_given_as_a_list():
    assert get_recipe("modern", freeze=["features.*", "stem.*"]).freeze == "features.*, stem.*"
    assert get_recipe("modern", output=1).output == "1"


@pytest.mark.parametrize("value", [None, 0.5, True, {"features": True}, ["features.*", None]])
def test_what_is_no_name_is_refused(value):
    with pytest.raises(LowRankError, match="freeze wants a value of type str, not"):
        get_recipe("modern", freeze=value)
