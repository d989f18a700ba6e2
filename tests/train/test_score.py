"""Hits and losses over batches, against the same counted at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.score import check_fits, check_outputs, score, score_by_loss

CPU = torch.device("cpu")
LOGITS = torch.randn(11, 7, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(11) % 7


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(LOGITS.split(4), LABELS.split(4), strict=True))


def test_batches_count_as_the_whole() -> None:
    network = nn.Identity().train()
    found = score(network, batches(), device=CPU)
    right = LOGITS.argsort(1, descending=True) == LABELS[:, None]
    assert found.top1 == pytest.approx(float(right[:, 0].double().mean()))
    assert found.top5 == pytest.approx(float(right[:, :5].any(1).double().mean()))
    assert found.loss == pytest.approx(float(functional.cross_entropy(LOGITS, LABELS)), rel=1e-5)
    assert (found.n, found.details, network.training) == (11, None, True)
    assert found.rank == found.top1


def test_a_loss_of_ones_own_is_a_mean_over_items() -> None:
    found = score_by_loss(nn.Identity(), batches(), functional.cross_entropy, forward=lambda x: x)
    assert found.loss == pytest.approx(float(functional.cross_entropy(LOGITS, LABELS)), rel=1e-9)
    assert found.top1 == score(nn.Identity(), batches(), device=CPU).top1
    assert found.rank == -found.loss
    values = [(part, part * 2) for part, _ in batches()]
    other = score_by_loss(nn.Identity(), values, functional.mse_loss, forward=lambda x: x)
    assert other.loss == pytest.approx(float(LOGITS.square().mean()), rel=1e-9)
    assert other.top1 is None


def test_networks_that_do_not_fit_are_told_what_would() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check_fits(network, (3, 8, 8), 4, CPU)
    with pytest.raises(LowRankError, match=r"has 4 outputs .* 5 classes: build it with num_classes=5"):
        check_fits(network, (3, 8, 8), 5, CPU)
    check_fits(network, (3, 8, 8), None, CPU)
    with pytest.raises(LowRankError, match="cannot take images of 1x8x8"):
        check_fits(network, (1, 8, 8), 4, CPU)
    with pytest.raises(LowRankError, match=r"gives 4x6x6 for an image, .* needs a loss of your own"):
        check_fits(network[0], (3, 8, 8), 4, CPU)
    with pytest.raises(LowRankError, match=r"cannot take images of 3x8x8: .* missing 1 required"):
        check_fits(nn.Bilinear(8, 8, 2), (3, 8, 8), 2, CPU)


def test_every_module_keeps_its_own_mode() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network[1].eval()  # frozen, in a network that trains
    modes = [module.training for module in network.modules()]
    images, device = torch.randn(4, 1, 8, 8), torch.device("cpu")
    batches = [(images, torch.tensor([0, 1, 0, 1]))]
    score(network, batches, device=device)
    score_by_loss(network, batches, functional.cross_entropy, forward=network)
    check_fits(network, (1, 8, 8), 2, device)
    assert [module.training for module in network.modules()] == modes


def test_the_number_of_outputs_is_checked_where_the_network_is() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check_outputs(network, (3, 8, 8), 4)
    with pytest.raises(LowRankError, match=r"has 4 outputs .* 5 classes: build it with num_classes=5"):
        check_outputs(network, (3, 8, 8), 5)
    check_outputs(network, (1, 8, 8), 5)  # it fails here, and `check_fits` says why on the device that trains


def test_weights_that_a_first_forward_makes_are_left_to_the_seeded_run() -> None:
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check_outputs(network, (3, 8, 8), 5)
    assert network[0].has_uninitialized_params()


def test_equal_scores_count_once_in_all_figures() -> None:
    """In half precision the two highest scores of many images are equal."""
    logits = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[0], labels = 0, torch.arange(2000) % 10
    found = score(nn.Identity(), [(logits, labels)], device=CPU, classes=list("abcdefghij"))
    assert found.details is not None
    assert found.top1 == float((logits.argmax(1) == labels).double().mean())
    assert found.top1 == int(found.details.confusion.diagonal().sum()) / 2000
