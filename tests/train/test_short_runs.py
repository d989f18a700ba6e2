"""Fast biases, Lookahead and views of test images: each against the same thing written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train.evaluate import averaged_views
from lowrank_cnn.train.inputs import patch_covariance, whitening_filters
from lowrank_cnn.train.optimizers import learning_rate, look_ahead
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.step import TrainingStep

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 6, 6, generator=draw), torch.arange(8) % 5


def trained(recipe: Recipe, steps: int) -> TrainingStep:
    net = network()
    step = TrainingStep(net, net, lambda loss: loss.backward(), recipe, CPU)
    for iteration in range(steps):
        step.prepare(0.1, iteration, epochs=iteration / steps)
        step(*batch())
    return step


def test_biases_of_norms_learn_by_a_rate_and_a_decay_of_their_own():
    step = trained(Recipe(epochs=1, momentum=0.9, nesterov=True, weight_decay=0.01, bias_rate=8.0), 5)
    other = network()
    weights, rest = [other[0].weight, other[3].weight], [other[0].bias, other[1].weight, other[3].bias]
    groups = [
        {"params": weights, "weight_decay": 0.01},
        {"params": rest, "weight_decay": 0.0},
        {"params": [other[1].bias], "lr": 0.8, "weight_decay": 0.01 / 8},
    ]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(5):
        plain.zero_grad()
        images, labels = batch()
        F.cross_entropy(other(images), labels).backward()
        plain.step()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(step.weights[name], value, rtol=1e-4, atol=1e-6)


def test_lookahead_blends_into_slow_weights_and_goes_on_from_there():
    weights = {"w": torch.tensor([4.0]), "seen": torch.tensor(7)}
    slow = {"w": torch.tensor([0.0]), "seen": torch.tensor(0)}
    look_ahead(weights, slow, decay=0.75)
    assert slow["w"].item() == weights["w"].item() == 1.0
    assert slow["seen"] == 7


def test_lookahead_happens_every_so_many_steps_of_a_run():
    plain, slowed = (trained(Recipe(epochs=1, lookahead=k, lookahead_decay=0.5), 4) for k in (0, 2))
    assert not plain.averages
    name = "3.weight"
    assert not torch.equal(plain.weights[name], slowed.weights[name])
    # What was blended last, before the third step, is not what the last two steps have made since.
    again = trained(Recipe(epochs=1, lookahead=2, lookahead_decay=0.5), 2)
    slow, fast = again.averages[name].clone(), again.weights[name].clone()
    again.prepare(0.1, 2, epochs=2 / 4)
    blended = again.weights[name]
    assert torch.equal(again.averages[name], blended)
    torch.testing.assert_close(blended, slow.lerp(fast, 1 - 0.5 * 0.5**3))  # in the middle of the run


def test_a_triangle_rises_to_its_peak_and_falls_to_its_end():
    recipe = Recipe(schedule="triangle", lr=2.0, epochs=10, warmup=2.0, lr_start=0.2, lr_end=0.1)
    rates = [learning_rate(recipe, i, per_epoch=10) for i in range(101)]
    assert rates[0] == pytest.approx(0.4)
    assert rates[10] == pytest.approx(0.4 + 0.8)
    assert max(rates) == rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(2.0 - 0.9)
    assert rates[100] == pytest.approx(0.2)


def test_views_of_an_image_are_averaged():
    images = torch.randn(3, 1, 4, 4)

    def corner(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 0, 0]

    torch.testing.assert_close(averaged_views(corner, Recipe())(images), images[:, :, 0, 0])
    both = averaged_views(corner, Recipe(test_mirror=True))(images)
    torch.testing.assert_close(both, (images[:, :, 0, 0] + images[:, :, 0, 3]) / 2)
    shifted = averaged_views(corner, Recipe(test_shift=1))(images)
    # The border is reflected, so that up and left of the corner stands what is down and right of it.
    torch.testing.assert_close(shifted, (images[:, :, 0, 0] + images[:, :, 1, 1]) / 2)


def test_the_short_recipe_says_what_airbench_found_for_a_mean_loss():
    recipe = get_recipe("cifar10-fast")
    per_step = 1024 * (1 + 1 / (1 - recipe.momentum))  # airbench's rates are for sums, and apart from momentum
    assert recipe.lr == pytest.approx(11.5 * 1024 / per_step, rel=1e-3)
    assert recipe.weight_decay * recipe.lr == pytest.approx(0.0153 * 1024 / per_step, rel=1e-3)


def test_a_run_with_all_of_it_resumes_to_the_same_weights(tmp_path: Path):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (40, 3, 12, 12), generator=draw).to(torch.uint8)
    split = ResidentSplit.of(images, torch.arange(40) % 10)
    data = Data("noise", tuple("abcdefghij"), split, split)
    recipe = get_recipe("cifar10-fast", epochs=4, batch_size=8, crop=12, lookahead=3)

    def run(out: Path, **how: Any) -> nn.Module:
        torch.manual_seed(0)
        net = lr.create_model("airbench-lr", width=0.25)
        lr.fit(net, data, recipe, out=out, device="cpu", progress=False, **how)
        return net

    def stop(row: Any, _: nn.Module) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", callbacks=[stop], checkpoint_every=0.0)
    resumed = run(tmp_path / "cut", resume=True)
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert not whole.features.patches.weight.requires_grad  # type: ignore[union-attr]


def smooth_images(n: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(n)
    return F.avg_pool2d(torch.randn(n, 3, 14, 14, generator=draw), 3, stride=1)


def squares(n: int) -> Data:
    images = (smooth_images(n) * 60 + 128).clamp(0, 255).to(torch.uint8)
    split = ResidentSplit.of(images, torch.arange(n) % 2)
    return Data("squares", ("a", "b"), split, split)


@pytest.mark.parametrize(("filters", "shape"), [(24, (2, 2)), (10, (3, 1)), (60, (3, 3))])
def test_filters_give_patches_equal_variance_and_no_correlation(filters: int, shape: tuple[int, int]):
    images = 10 * smooth_images(64)  # so that epsilon is small beside every variance
    weight = torch.randn(filters, 3, *shape)
    white = whitening_filters(weight, patch_covariance(images, weight.shape[2:], torch.Tensor.clone))
    pairs = min(3 * shape[0] * shape[1], filters // 2)
    torch.testing.assert_close(white[:pairs], -white[pairs : 2 * pairs])
    outputs = F.conv2d(images.double(), white.double()).transpose(0, 1).flatten(1)
    seen = outputs[:pairs] @ outputs[:pairs].T / outputs.shape[1]
    torch.testing.assert_close(seen, torch.eye(pairs, dtype=seen.dtype), atol=0.05, rtol=0)
    assert outputs.pow(2).mean(1).sub(1).abs().max() < 0.05  # those left over too


@pytest.mark.parametrize("scheme", ["dense", "lr"])
def test_fit_whitens_the_first_layer_and_trains_what_is_behind_it(scheme: str):
    torch.manual_seed(0)
    net = nn.Sequential(
        lr.build_conv(3, 24, 3, scheme, bias=False),
        nn.ReLU(),
        nn.Conv2d(24, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    before = [p.clone() for p in net.parameters()]
    recipe = Recipe(batch_size=16, epochs=1, lr=0.1, whiten_first=True)
    lr.fit(net, squares(32), recipe, device="cpu", progress=False)
    first, behind = list(net[0].parameters()), list(net[2].parameters())
    assert not any(p.requires_grad for p in first)
    assert not torch.equal(first[0], before[0])
    assert not torch.equal(behind[0], before[len(first)])
    kept = [p.clone() for p in first]
    lr.fit(net, squares(32), Recipe(batch_size=16, epochs=1, lr=0.1), device="cpu", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True))


def test_a_network_without_a_first_conv_is_refused():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 2))
    recipe = Recipe(batch_size=16, epochs=1, whiten_first=True)
    with pytest.raises(LowRankError, match="begins with a conv"):
        lr.fit(net, squares(32), recipe, device="cpu", progress=False)
