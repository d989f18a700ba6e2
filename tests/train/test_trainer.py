"""The loop: what happens in an epoch, between steps, and at the end of a run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import lowrank_cnn as lr
from lowrank_cnn.train import Interrupted, load_record
from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.loop import Trainer


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The iteration after every step of the runs of a test, and whether the network was in training mode."""
    taken: list[tuple[int, bool]] = []
    look_around = Trainer._look_around

    def look(self: Trainer, stop: StopRequest) -> None:
        taken.append((self.iteration, self.network.training))
        look_around(self, stop)

    monkeypatch.setattr(Trainer, "_look_around", look)
    return taken


def test_every_epoch_takes_its_steps_in_training_mode(driver, steps):
    _, record = driver.train(None, driver.PLAIN)
    per_epoch = len(steps) // driver.PLAIN.epochs
    assert [step for step, _ in steps] == list(range(1, 3 * per_epoch + 1))
    assert all(training for _, training in steps)
    assert [row["epoch"] for row in record.history] == [1, 2, 3]
    assert record.result["epochs"] == 3


def test_epochs_are_evaluated_as_often_as_the_recipe_says(driver):
    recipe = dataclasses.replace(driver.PLAIN, epochs=5, evaluate_every=2)
    _, record = driver.train(None, recipe)
    assert [row["accuracy"] is not None for row in record.history] == [False, True, False, True, True]


@pytest.mark.parametrize(("changes", "tests"), [({"evaluate_every": 3}, 1), ({}, 3), ({"holdout": 0.2}, 4)])
def test_the_last_weights_are_tested_once(driver, monkeypatch, changes: dict, tests: int):
    """An average of the weights is what is tested, and which answers were right is known."""
    evaluate, found = Trainer._evaluate, []

    def counted(self: Trainer, loader, *, details: bool = False):
        result = evaluate(self, loader, details=details)
        found.append(result.top1)
        return result

    monkeypatch.setattr(Trainer, "_evaluate", counted)
    network, record = driver.train(None, dataclasses.replace(driver.PLAIN, ema=0.9, **changes))
    assert len(found) == tests
    assert record.result["top1"] == found[-1] == pytest.approx(float(record.right.double().mean()))
    assert lr.evaluate(network, driver.tiny_data(), progress=False, device="cpu").top1 == pytest.approx(
        record.result["top1"]
    )


def test_callbacks_see_the_network_before_it_is_tested(driver):
    def spoil(_, network: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()

    _, record = driver.train(None, driver.PLAIN, callbacks=[spoil])
    assert record.result["loss"] == pytest.approx(math.log(len(record.data["classes"])), abs=1e-4)


def test_accuracy_that_levels_off_ends_the_run(driver):
    recipe = dataclasses.replace(driver.PLAIN, epochs=40, lr=1e-9, holdout=0.2, early_stop=2)
    _, record = driver.train(None, recipe)
    assert len(record.history) == 3


def test_the_best_weights_are_kept_beside_the_last(driver, tmp_path):
    driver.train(tmp_path, driver.PLAIN)
    record = load_record(tmp_path)
    [best] = tmp_path.glob("best-*.safetensors")
    per_epoch = driver.newest(tmp_path) // driver.PLAIN.epochs
    assert best.stem == f"best-{record.result['best_epoch'] * per_epoch:08d}"


def test_a_request_to_stop_saves_and_leaves_after_the_step(driver, tmp_path, monkeypatch):
    look_around = Trainer._look_around

    def stop_at_four(self: Trainer, stop: StopRequest) -> None:
        stop.received = self.iteration == 4
        look_around(self, stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_look_around", stop_at_four)
        with pytest.raises(Interrupted, match="all is saved"):
            driver.train(tmp_path, driver.PLAIN)
    assert driver.newest(tmp_path) == 4
    whole, _ = driver.train(None, driver.PLAIN)
    again, _ = driver.train(tmp_path, driver.PLAIN, resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
