"""A teacher is shown what it was trained on, and its student learns from it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from lowrank_cnn.data import Standardize
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.teaching import make_teacher
from lowrank_cnn.train.trained import Trained

CPU = torch.device("cpu")


def test_a_teacher_gets_images_as_it_was_trained_on(driver):
    """The student's images have another mean and deviation."""
    data = driver.tiny_data()
    ours = Standardize(torch.tensor([100.0]), torch.tensor([50.0]))
    theirs = Standardize(torch.tensor([20.0]), torch.tensor([7.0]))
    trained = Trained(nn.Identity(), theirs, Recipe(), data.classes, (1, 8, 8))
    answer = make_teacher(trained, data, ours, CPU, contextlib.nullcontext)
    pixels = data.test.images[:4]
    torch.testing.assert_close(answer(ours(pixels)), theirs(pixels), rtol=1e-5, atol=1e-5)


def test_a_student_learns_from_a_run_without_labels(driver, tmp_path):
    """With the whole weight on the teacher, labels that are all wrong do no harm."""
    driver.train(tmp_path / "teacher", driver.PLAIN, epochs=12)
    teacher = driver.tiny_net()
    teacher.load_state_dict(driver_weights(driver, tmp_path / "teacher"))
    data = driver.tiny_data()
    wrong = dataclasses.replace(data, train=type(data.train).of(data.train.images, (data.train.labels + 1) % 4))
    recipe = dataclasses.replace(driver.PLAIN, epochs=12, distill_weight=1.0)
    taught = fit(driver.tiny_net(seed=5), wrong, recipe, teacher=teacher, progress=False, device="cpu")
    untaught = fit(driver.tiny_net(seed=5), wrong, recipe, progress=False, device="cpu")
    assert taught.result["top1"] > 0.7 > untaught.result["top1"]


def driver_weights(driver, directory) -> dict[str, torch.Tensor]:
    weights = driver.last_weights(directory)
    return {name.removeprefix("model."): t for name, t in weights.items() if name.startswith("model.")}


def test_teachers_of_other_classes_or_kinds_are_refused(driver):
    data, preprocess = driver.tiny_data(), Standardize(torch.zeros(1), torch.ones(1))
    other = Trained(nn.Identity(), preprocess, Recipe(), ("a", "b"), (1, 8, 8))
    with pytest.raises(LowRankError, match="other classes"):
        make_teacher(other, data, preprocess, CPU, contextlib.nullcontext)
    with pytest.raises(LowRankError, match="not a int"):
        make_teacher(3, data, preprocess, CPU, contextlib.nullcontext)  # type: ignore[arg-type]
