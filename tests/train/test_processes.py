"""Several processes train what one would, and outlive the death of one of them."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.train import load_record

TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it"),
]


def assert_close(one: dict, other: dict) -> None:
    weights = [name for name in one if name.startswith(("model.", "momentum."))]
    assert weights
    for name in weights:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


def test_two_processes_give_the_weights_of_one(driver, program, tmp_path):
    process = program("processes", tmp_path / "two", launcher=TWO)
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    _, alone = driver.train(tmp_path / "one", driver.PLAIN)
    together = load_record(tmp_path / "two")
    assert together.processes == 2
    assert_close(driver.last_weights(tmp_path / "one"), driver.last_weights(tmp_path / "two"))
    assert together.result["n"] == alone.result["n"] == 24
    assert together.result["top1"] == alone.result["top1"]
    for ours, theirs in zip(together.history, alone.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)


def test_a_run_goes_on_after_one_of_its_processes_died(driver, program, tmp_path):
    process = program("processes", tmp_path / "two", 12, launcher=TWO)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert driver.newest(tmp_path / "two") == 10
    process = program("processes", tmp_path / "two", launcher=TWO)
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    driver.train(tmp_path / "one", driver.PLAIN)
    assert_close(driver.last_weights(tmp_path / "one"), driver.last_weights(tmp_path / "two"))
