from __future__ import annotations

import dataclasses
import pickle

import pytest

from lowrank_cnn.choose.candidates import FAMILIES, Builder, Design
from lowrank_cnn.choose.runs import DesignRun, DesignTrainer, RunMaker
from lowrank_cnn.data import Data
from lowrank_cnn.train import get_recipe


def test_the_answers_of_a_run_give_the_accuracy_of_its_record(squares: Data):
    recipe = get_recipe("cifar10-fast", batch_size=32, epochs=1, crop=12)
    builder = Builder(FAMILIES["airbench"], (1, 12, 12), 2, base=0.25)
    outcome = DesignTrainer(builder, squares, recipe, "cpu").train(Design("dense"), 1)
    assert outcome.right.shape == (len(squares.test),)
    assert float(outcome.right.double().mean()) == pytest.approx(outcome.record.result["top1"])
    assert [row["accuracy"] is not None for row in outcome.record.history] == [True]


@pytest.mark.nightly
def test_a_run_in_another_process_finds_the_same(squares: Data):
    """What another process gets is a pickled copy; runs on held-out images are those of the same images."""
    recipe = get_recipe("cifar10-fast", batch_size=32, epochs=1, crop=12)
    builder = Builder(FAMILIES["airbench"], (1, 12, 12), 2, base=0.25)
    maker = RunMaker(DesignTrainer(builder, squares, recipe, "cpu"))
    copy = pickle.loads(pickle.dumps(maker))
    for run, images in ((DesignRun(Design("dense"), 3), 20), (DesignRun(Design("dense"), 3, 0.5, True), 6)):
        ours, theirs = (dataclasses.replace(do(run), wall=0, images_per_second=0) for do in (maker, copy))
        assert ours == theirs
        assert ours.images == images
