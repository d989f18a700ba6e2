from __future__ import annotations

import pytest

from lowrank_cnn.data import Data
from lowrank_cnn.frontier.designs import FAMILIES, Builder, Design
from lowrank_cnn.frontier.training import DesignTrainer
from lowrank_cnn.train import get_recipe


def test_the_answers_of_a_run_give_the_accuracy_of_its_record(squares: Data):
    recipe = get_recipe("cifar10-fast", batch_size=32, epochs=1, crop=12)
    builder = Builder(FAMILIES["airbench"], (1, 12, 12), 2, base=0.25)
    outcome = DesignTrainer(builder, squares, recipe, "cpu").train(Design("dense"), 1)
    assert outcome.right.shape == (len(squares.test),)
    assert float(outcome.right.double().mean()) == pytest.approx(outcome.record.result["top1"])
    assert [row["accuracy"] is not None for row in outcome.record.history] == [True]
