"""The position of a run in words, and what a checkpoint says of its run."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.train.loop import ABOUT
from lowrank_cnn.train.run_folder import CheckpointStore, Position


@pytest.mark.parametrize(
    ("position", "told"),
    [
        (Position(), "before any training"),
        (Position(batch=1), "after 1 batch of the first of 10 epochs"),
        (Position(epoch=3), "after 3 of 10 epochs"),
        (Position(epoch=3, batch=2), "after 3 of 10 epochs and 2 batches of the next"),
    ],
)
def test_a_position_in_words(position, told):
    assert position.told(10) == told


def test_a_run_is_complete_after_its_epochs_or_when_it_was_stopped():
    assert not Position(epoch=9, batch=5).done(10)
    assert Position(epoch=10).done(10)
    assert Position(epoch=2, stopped=True).done(10)


def test_a_checkpoint_says_what_its_run_depends_on(driver, tmp_path):
    driver.train(tmp_path, driver.PLAIN, epochs=1)
    found = CheckpointStore(tmp_path).latest(pytest.fail)
    assert found is not None
    assert set(ABOUT) <= found.state.keys()
    assert found.state["conditions"]["threads"] == torch.get_num_threads()
    assert found.state["conditions"]["deterministic"] is False
    assert found.part("random.0").keys() >= {"python", "numpy", "torch"}
