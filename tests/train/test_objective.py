"""Losses against their definitions in double precision."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Standardize
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.objective import Objective, balanced_weights
from lowrank_cnn.train.trained import Trained, make_teacher

LOGITS = torch.tensor([[2.0, 0.5, -1.0], [0.1, 0.2, 0.3]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])
IMAGES = torch.zeros(2, 1, 1, 1)


def test_class_weights() -> None:
    weights = balanced_weights(SimpleNamespace(labels=torch.tensor([0, 0, 0, 1])), 3)
    assert weights.tolist() == pytest.approx([4 / (2 * 3), 4 / 2, 0.0])
    loss, _ = Objective(Recipe(), class_weights=weights)(LOGITS, LABELS, IMAGES)
    per_image = functional.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (per_image * weights[LABELS]).sum() / weights[LABELS].sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_a_teacher_counts_by_its_share_and_temperature() -> None:
    recipe = Recipe(distill_weight=0.25, distill_temperature=3.0)
    theirs = LOGITS.flip(1)
    loss, shown = Objective(recipe, teacher=lambda _: theirs)(LOGITS, LABELS, IMAGES)
    p, q = (theirs / 3).softmax(1), (LOGITS / 3).softmax(1)
    divergence = 9 * (p * (p / q).log()).sum(1).mean()
    expected = 0.75 * functional.cross_entropy(LOGITS, LABELS) + 0.25 * divergence
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(shown) == pytest.approx(float(functional.cross_entropy(LOGITS, LABELS)), rel=1e-6)


CPU = torch.device("cpu")


def given(data, preprocess):
    """What a teacher asks of the inputs of a run."""
    return SimpleNamespace(data=data, preprocess=preprocess, size=(1, 8, 8))


def test_a_teacher_gets_images_as_it_was_trained_on(driver):
    """The student's images have another mean and deviation."""
    data = driver.tiny_data()
    ours = Standardize(torch.tensor([100.0]), torch.tensor([50.0]))
    theirs = Standardize(torch.tensor([20.0]), torch.tensor([7.0]))
    means = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    trained = Trained(means, theirs, Recipe(), data.classes, (1, 8, 8))
    answer = make_teacher(trained, given(data, ours), CPU, contextlib.nullcontext)
    pixels = data.test.images[:4]
    torch.testing.assert_close(answer(ours(pixels)), means(theirs(pixels)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("network", "image", "says"),
    [
        (nn.Flatten(), (1, 16, 16), "trained on images of 16x16, and those of this run have 8x8"),
        (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            (1, 8, 8),
            "the teacher does not fit the data: .* 1 output for an image, and the data 4 classes",
        ),
        (
            nn.Conv2d(3, 4, 3),
            (1, 8, 8),
            "does not fit the data: .* cannot take .*1x8x8: Given groups=1",
        ),
    ],
)
def test_teachers_of_other_images_are_refused(
    driver, network: nn.Module, image: tuple[int, ...], says: str
) -> None:
    data, preprocess = driver.tiny_data(), Standardize(torch.zeros(1), torch.ones(1))
    trained = Trained(network, preprocess, Recipe(), data.classes, image)
    with pytest.raises(LowRankError, match=says):
        make_teacher(trained, given(data, preprocess), CPU, contextlib.nullcontext)


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
        make_teacher(other, given(data, preprocess), CPU, contextlib.nullcontext)
    with pytest.raises(LowRankError, match="not a int"):
        make_teacher(3, given(data, preprocess), CPU, contextlib.nullcontext)  # type: ignore[arg-type]


def test_the_mode_of_a_teacher_stays(driver):
    teacher = driver.tiny_net(stateful=True).train()
    before = teacher[1].running_mean.clone()
    fit(driver.tiny_net(), driver.tiny_data(), driver.PLAIN, teacher=teacher, progress=False, device="cpu")
    assert all(module.training for module in teacher.modules())
    assert torch.equal(teacher[1].running_mean, before)
