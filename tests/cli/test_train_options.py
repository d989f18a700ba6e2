"""What each group of options stands for, without a run."""

from __future__ import annotations

import pytest

from lowrank_cnn.cli.train import ImageOptions, NetworkOptions, RecipeOptions, RunOptions
from lowrank_cnn.train import get_recipe


def test_options_win_over_a_file_and_settings_over_both():
    settings = ["momentum=0.5", "label-smoothing=0.2", "lr=0.1"]
    options = RecipeOptions("modern", epochs=3, lr=0.02, settings=settings)
    recipe = options.resolve({"epochs": 9, "batch_size": 32}, "none")
    assert (recipe.epochs, recipe.batch_size, recipe.lr) == (3, 32, 0.1)
    assert (recipe.momentum, recipe.label_smoothing, recipe.norm) == (0.5, 0.2, None)


def test_the_recipe_chooses_the_norm_except_for_trained_weights_and_networks_that_are_not_ours():
    recipe = get_recipe("modern")
    assert recipe.network()["norm"] == "batch"
    built = NetworkOptions(width=0.5).building("nin", "lr", recipe)
    assert built == {**recipe.network(), "scheme": "lr", "width": 0.5, "stride": None, "pretrained": None}
    for model, options in [("nin", NetworkOptions(pretrained="cifar10")), ("mine.py:net", NetworkOptions())]:
        built = options.building(model, None, recipe)
        assert "pool" not in built
        assert built["norm"] is None


def test_options_of_a_run_have_the_names_and_defaults_of_fit():
    plain = RunOptions().for_fit()
    assert (plain["compile"], plain["log"], plain["checkpoint_activations"]) == ("auto", (), False)
    assert "teacher" not in plain
    assert RunOptions(compile_=False, recompute=True).for_fit()["checkpoint_activations"] is True


def test_images_are_read_with_every_option_and_hold_in_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowrank_cnn.data.open_data", lambda *words, **options: (words, options))
    words, options = ImageOptions(limit=7, hold=0.5).reading("photos", progress=False)(bad="raise")
    assert words == ("photos",)
    assert (options["limit"], options["resident_bytes"], options["bad"]) == (7, 2**29, "raise")
    assert "hold" not in options
    assert ImageOptions(hold=float("inf")).reading("photos", progress=False)()[1]["resident_bytes"] > 2**50
