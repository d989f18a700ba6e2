"""Devices that are not there are named, and batch norm sees all of a batch or says that it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import load_record
from lowrank_cnn.train.distributed import batch_norm_over_all, copy_from_first, resolve_device


def processes(n: int, device: str) -> Any:
    return SimpleNamespace(world_size=n, device=torch.device(device))


@pytest.mark.parametrize(
    ("device", "found", "sentence"),
    [
        ("meta", 0, "'meta' is no device to compute on"),
        ("mps", 0, "there is no MPS device here"),
        ("cuda", 0, "there is no CUDA device here"),
        ("cuda:x", 2, "there is no device 'cuda:x'"),
        ("cuda:2", 2, "no device 'cuda:2': this machine has 2"),
        ("cuda:1", 2, None),
    ],
)
def test_a_device_that_is_not_there_is_named(monkeypatch, device, found, sentence):
    counts = {"cpu": lambda: 1, "cuda": lambda: found, "mps": lambda: found}
    monkeypatch.setattr("lowrank_cnn.train.distributed._FOUND", counts)
    if sentence is None:
        assert resolve_device(device) == device
        return
    with pytest.raises(LowRankError, match=sentence):
        resolve_device(device)


def test_batch_norm_sees_all_gpus_while_training_and_is_itself_again_after(driver):
    network = driver.tiny_net(stateful=True)
    own, state = network[1], network.state_dict()
    with batch_norm_over_all(processes(2, "cuda"), network, pytest.fail):
        assert isinstance(network[1], nn.SyncBatchNorm)
        assert network.state_dict().keys() == state.keys()
        for name, value in network.state_dict().items():
            assert value.data_ptr() == state[name].data_ptr(), name
        network.eval()
    assert network[1] is own
    assert not own.training
    with batch_norm_over_all(processes(1, "cuda"), network, pytest.fail):
        assert network[1] is own


def test_on_processes_without_gpus_batch_norm_says_what_it_sees(driver):
    said: list[str] = []
    network = driver.tiny_net(stateful=True)
    with batch_norm_over_all(processes(2, "cpu"), network, said.append):
        assert isinstance(network[1], nn.BatchNorm2d)
    assert len(said) == 1
    assert "each of the 2 processes" in said[0]


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

several = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")


def assert_close(one: dict, other: dict) -> None:
    weights = [name for name in one if name.startswith(("model.", "momentum."))]
    assert weights
    for name in weights:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


def test_all_processes_get_the_tensors_of_the_first(monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source: tensor.fill_(7 + source))
    ours = torch.zeros(2, 3).t()
    copy_from_first(processes(2, "cpu"), [ours])
    assert ours.eq(7).all()
    copy_from_first(processes(1, "cpu"), [mine := torch.zeros(2)])
    assert mine.eq(0).all()


@several
@pytest.mark.nightly
def test_the_network_that_is_saved_is_the_one_that_all_processes_test(program, tmp_path):
    process = program("statistics", tmp_path / "run", launcher=TWO)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    ours, theirs = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@several
@pytest.mark.nightly
def test_two_processes_of_which_one_died_give_the_weights_of_one(driver, program, tmp_path):
    process = program("processes", tmp_path / "two", 12, launcher=TWO)
    process.communicate(timeout=600)
    assert process.returncode != 0
    assert driver.newest(tmp_path / "two") == 10
    process = program("processes", tmp_path / "two", launcher=TWO)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    _, alone = driver.train(tmp_path / "one", driver.PLAIN)
    together = load_record(tmp_path / "two")
    assert together.processes == 2
    assert_close(driver.last_weights(tmp_path / "one"), driver.last_weights(tmp_path / "two"))
    assert together.result["n"] == alone.result["n"] == 24
    assert together.result["top1"] == alone.result["top1"]
    for ours, theirs in zip(together.history, alone.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
