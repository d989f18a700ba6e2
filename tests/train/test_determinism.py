"""What the last bits depend on is recorded, said when it changes, and kept by deterministic=True."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from lowrank_cnn.core.clock import torch_threads
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.device import mode
from lowrank_cnn.train import load_record
from lowrank_cnn.train.distributed import repeatable, seed_generators
from tests.support import assert_equal_weights


def test_settings_are_put_back():
    before, threads = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.get_num_threads()
    with repeatable(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        assert mode() == "off"
        torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == before
    with repeatable(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_algorithm_is_one_sentence():
    told = r"cannot be trained with deterministic=true: x does not have a deterministic implementation\.$"
    with pytest.raises(LowRankError, match=told), repeatable(True):
        raise RuntimeError("x does not have a deterministic implementation, but you set it. You can turn it off")
    with pytest.raises(RuntimeError, match="something else"), repeatable(True):
        raise RuntimeError("something else")


def test_several_processes_are_refused():
    with pytest.raises(LowRankError, match="one process"), repeatable(True, processes=2):
        pytest.fail("entered")


@pytest.mark.parametrize("deterministic", [False, True])
def test_resuming_with_other_threads_is_said_or_prevented(driver, tmp_path, capsys, deterministic):
    how = {"deterministic": deterministic, "progress": True}
    with torch_threads(1):
        driver.train(tmp_path, driver.PLAIN, epochs=1, **how)
    with torch_threads(2):
        _, record = driver.train(tmp_path, driver.PLAIN, epochs=2, resume=True, **how)
        assert torch.get_num_threads() == 2
    change = {"epoch": 1, "field": "threads", "from": 1, "to": 2}
    assert (change in record.changes) is not deterministic
    assert ("From here on, threads is 2; it was 1." in capsys.readouterr().out) is not deterministic
    stored = load_record(tmp_path).environment
    assert (stored["threads"], stored["deterministic"]) == (1 if deterministic else 2, deterministic)


def test_deterministic_runs_have_the_same_bits(driver, tmp_path):
    assert_equal_weights(*(driver.train(None, epochs=2, deterministic=True)[0] for _ in range(2)))


def draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_processes_draw_from_streams_of_their_own():
    seed_generators(3, rank=0)
    first = draw()
    seed_generators(3, rank=1)
    assert draw() != first
    seed_generators(3)
    assert draw() == first
