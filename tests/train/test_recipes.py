"""The table of recipes: the paper's hold what was published, and a name that is not there names its neighbour."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.recipes import RECIPES, get_recipe


def test_the_published_hyper_parameters():
    vgg = RECIPES["vgg-paper"]
    assert (vgg.batch_size, vgg.momentum, vgg.weight_decay, vgg.lr) == (256, 0.9, 5e-4, 0.01)
    assert vgg.schedule == RECIPES["nin-paper"].schedule == "paper"
    googlenet = RECIPES["googlenet-paper"]
    assert (googlenet.schedule, googlenet.power, googlenet.aux_weight) == ("poly", 0.5, 0.3)
    assert RECIPES["nin-paper"].preprocess == "whiten"
    assert RECIPES["nin-paper"].crop == 30


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(LowRankError, match="did you mean nin-paper"):
        get_recipe("nin-papr")
