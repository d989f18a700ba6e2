"""The first layer that whitens: its outputs have no correlation and equal variance, whatever its shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.whitening import patch_covariance, whitening_filters


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
