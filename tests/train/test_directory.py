"""What may change when a run goes on."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.run_folder import FIXED, recipe_changes

RECIPE = get_recipe("modern", ema=0.0)
OTHERS = {
    "batch_size": 7,
    "holdout": 0.5,
    "preprocess": "whiten",
    "zca_epsilon": 0.5,
    "resize": 9,
    "crop": 9,
    "ema": 0.5,
    "norm": None,
    "pool": "average",
    "lookahead": 5,
    "whiten_first": True,
    "alternate_mirror": True,
    "optimizer": "adamw",
    "freeze": "features.*",
}


@pytest.mark.parametrize(("field", "value"), OTHERS.items())
def test_what_a_run_hangs_on_is_fixed(field, value):
    with pytest.raises(LowRankError, match=f"started with {field}="):
        recipe_changes(RECIPE.to_dict(), get_recipe("modern", **{"ema": 0.0, field: value}))


def test_every_fixed_field_is_tried():
    assert set(FIXED) == set(OTHERS)


def test_the_rest_may_change_and_is_told():
    assert recipe_changes(RECIPE.to_dict(), get_recipe("modern", ema=0.0, lr=0.5)) == {"lr": (0.1, 0.5)}


def test_a_checkpoint_from_before_a_field_can_go_on():
    saved = RECIPE.to_dict()
    del saved["pool"]
    assert recipe_changes(saved, RECIPE) == {}
