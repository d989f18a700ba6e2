"""A run before it begins: its options, its identity, and what it continues from."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.distributed import launch
from lowrank_cnn.train.fit import ExecutionOptions, Extras, Job, about
from lowrank_cnn.train.progress import Progress
from lowrank_cnn.train.run_folder import RunDirectory
from lowrank_cnn.train.step import EAGER


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_loss_of_ones_own_leaves_nothing_unused(driver):
    own = Extras(loss=nn.functional.cross_entropy)
    own.check(driver.PLAIN)
    with pytest.raises(LowRankError, match="set class_weights=none"):
        own.check(dataclasses.replace(driver.PLAIN, class_weights="balanced"))
    with pytest.raises(LowRankError, match="ask the teacher within it"):
        dataclasses.replace(own, teacher=driver.tiny_net()).check(driver.PLAIN)
    Extras(teacher=driver.tiny_net()).check(dataclasses.replace(driver.PLAIN, class_weights="balanced"))


@pytest.fixture
def make(driver):
    def make(directory=None, recipe=driver.PLAIN, **options) -> Job:
        fabric, execution = launch("cpu", "fp32"), ExecutionOptions(**options)
        data, place = driver.tiny_data(), directory and RunDirectory(directory)
        return Job(fabric, driver.tiny_net(), data, recipe, 0, "auto", execution, place, Heard())

    return make


def test_options_that_exclude_each_other_are_refused():
    with pytest.raises(LowRankError, match='compile is True, False or "auto"'):
        ExecutionOptions(compile="yes")  # type: ignore[arg-type]
    with pytest.raises(LowRankError, match="exclude each other"):
        ExecutionOptions(compile=True, recompute=True)


def test_the_precision_is_that_of_the_device(make):
    job = make()
    assert job.precision == "fp32"
    assert not job.graphs  # which are for CUDA devices


def test_a_run_is_identified_by_network_data_and_seed(driver):
    net, data = driver.tiny_net(), driver.tiny_data()
    one = about(net, data, 0)
    assert one["data"]["digest"] == data.digest
    assert one["data"]["train"] == len(data.train)
    assert one != about(net, data, 1)


def test_a_run_goes_on_only_where_there_is_one(make, driver, tmp_path):
    with pytest.raises(LowRankError, match="give --out"):
        make().saved(resume=True)
    fresh = make(tmp_path / "run")
    assert fresh.saved(resume=True) is None
    assert "There is nothing to resume" in fresh.shown.lines[0]
    driver.train(tmp_path / "run", driver.PLAIN)
    with pytest.raises(LowRankError, match="already holds a run"):
        make(tmp_path / "run").saved(resume=False)
    checkpoint = make(tmp_path / "run").saved(resume=True)
    assert checkpoint is not None
    assert checkpoint.state["position"]["epoch"] == driver.PLAIN.epochs


def test_a_finished_run_is_not_trained_again(make, driver, tmp_path):
    driver.train(tmp_path, driver.PLAIN)
    job = make(tmp_path)
    done = job.finished()
    assert done is not None
    assert done.status == "finished"
    assert "nothing is left to do" in job.shown.lines[0]


def test_the_recipe_sets_the_dropout_of_the_network(make, driver):
    from dataclasses import replace

    job = make(recipe=replace(driver.PLAIN, dropout=0.25))
    job.model.append(nn.Dropout(0.5))
    builder = job.step_builder((1, 8, 8), None)
    assert list(builder.forwards) == [EAGER]
    assert [module.p for module in job.model.modules() if isinstance(module, nn.Dropout)][-1] == 0.25
    assert not torch.backends.cudnn.benchmark
