"""Blends of two images have the labels of both, in the share of their pixels."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.augment import Mixer
from lowrank_cnn.train import fit, get_recipe

IMAGES = torch.arange(8, dtype=torch.float64).view(8, 1, 1, 1).expand(8, 3, 16, 20).clone()
LABELS = torch.arange(8)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_targets_say_what_the_pixels_are(mixup: float, cutmix: float) -> None:
    """Every pixel is its class number, so that the mean of an image is the mean of its targets."""
    for batch in range(6):
        mixed, targets = Mixer(mixup, cutmix, 8, seed=0)(IMAGES, LABELS, 0, batch)
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        means = (targets.double() * torch.arange(8).double()).sum(1)
        torch.testing.assert_close(mixed.mean((1, 2, 3)), means, rtol=1e-5, atol=1e-6)
    values = {float(value) for value in mixed.unique()}
    assert cutmix == 0 or mixup or values <= set(range(8))  # CutMix pastes, and blends nothing


def test_draws_depend_on_seed_epoch_and_batch_alone() -> None:
    def mixed(seed: int, epoch: int, batch: int) -> torch.Tensor:
        torch.manual_seed(batch * 100)
        return Mixer(0.4, 1.0, 8, seed=seed)(IMAGES, LABELS, epoch, batch)[0]

    torch.manual_seed(3)
    first = mixed(0, 1, 2)
    assert torch.equal(first, mixed(0, 1, 2))
    assert not torch.equal(first, mixed(1, 1, 2))
    assert not torch.equal(first, mixed(0, 2, 2))
    assert not torch.equal(first, mixed(0, 1, 3))


def test_a_run_with_everything_on_learns_and_repeats(driver) -> None:
    more = {"mixup": 0.2, "cutmix": 1.0, "zoom": 0.7, "jitter": 0.2, "auto_augment": "trivial", "accumulate": 2}
    recipe = get_recipe("digits", batch_size=16, epochs=3, crop="none", pad=0, **more)
    runs = [fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False, device="cpu") for _ in range(2)]
    assert runs[0].result["loss"] == runs[1].result["loss"]
    assert runs[0].history[-1]["train_loss"] < 1.5


def test_colours_cannot_be_changed_after_whitening(driver) -> None:
    recipe = get_recipe("digits", batch_size=16, epochs=1, crop="none", pad=0, preprocess="whiten", jitter=0.1)
    with pytest.raises(LowRankError, match="need preprocess=standardize"):
        fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False, device="cpu")
