from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.models import list_models
from lowrank_cnn.paper.experiments import EXPERIMENTS, PLACES, ExperimentLine, lines, parts_of
from lowrank_cnn.train import get_recipe


def test_every_experiment_names_a_recipe_and_networks_that_exist():
    for parts in EXPERIMENTS.values():
        for part in parts.values():
            assert get_recipe(part.recipe).name == part.recipe
            assert set(part.networks) <= set(list_models())
            assert set(part.own) <= set(part.networks)


def test_lines_are_named_by_network_variant_and_seed():
    assert ExperimentLine("init", "nin", "torch, no norm").directory(Path("out"), 3) == Path(
        "out/init/nin-torch-no-norm-seed3"
    )
    assert len(lines("tiny-imagenet")) == 11
    assert [line.network for line in lines("places")] == list(PLACES)


def test_a_part_of_an_experiment_can_be_named():
    assert {line.part for line in lines("cifar10", parts=("init",))} == {"init"}
    assert [line.network for line in lines("tiny-imagenet", networks=("vgg11",))] == ["vgg11"]
    with pytest.raises(LowRankError, match="did you mean cifar10"):
        parts_of("cifar")
