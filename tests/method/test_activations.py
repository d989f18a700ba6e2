"""A layer is refitted to activations as least squares has it, and never made worse by it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.activations import (
    image_batches,
    output_error,
    outputs,
    refit,
    relative_error,
    seen,
    window_covariance,
)
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.rewrite import replacement
from lowrank_cnn.method.schemes import fit_layer, parse_scheme

CONVS = [
    nn.Conv2d(8, 12, 3, padding=1),
    nn.Conv2d(8, 12, 5, stride=2, padding=2, groups=2, bias=False),
    nn.Conv2d(8, 8, (3, 5), padding="same", padding_mode="reflect", dilation=2),
    nn.Conv2d(8, 12, 4, padding="same"),
]


def smooth_images(n: int = 6) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, as those of photographs are."""
    x = torch.randn(n, 8, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nn.functional.avg_pool2d(x, 3, 1, 1).cumsum(1)


@pytest.mark.parametrize("conv", CONVS, ids=lambda conv: str(conv.kernel_size))
@pytest.mark.parametrize("scheme", ["separable(m=4)", "lr-join(m=4)", "mixture(kx1, 1xk, kxk, join, m=6)"])
@torch.no_grad()
def test_no_other_second_half_is_nearer(conv: nn.Conv2d, scheme: str):
    torch.manual_seed(0)
    conv, x = copy.deepcopy(conv).double(), smooth_images()
    layer = replacement(conv, parse_scheme(scheme))
    fit_layer("conv", conv, layer)
    right = conv(x)
    before = relative_error(layer(x), right)
    said = refit(layer, [x], [right])
    after = relative_error(layer(x), right)
    assert after <= before
    assert said == pytest.approx(after, rel=1e-6)
    last = layer[1].weights[0] if hasattr(layer[1], "weights") else layer[1].weight
    for _ in range(3):
        shaken = copy.deepcopy(layer)
        other = shaken[1].weights[0] if hasattr(shaken[1], "weights") else shaken[1].weight
        other.add_(0.05 * last.abs().mean() * torch.randn_like(other))
        assert relative_error(shaken(x), right) > after


@torch.no_grad()
def test_filters_nearest_in_what_they_give_beat_those_nearest_in_weight():
    torch.manual_seed(0)
    conv, x = copy.deepcopy(CONVS[0]).double(), smooth_images()
    errors = []
    for informed in (False, True):
        layer = replacement(conv, parse_scheme("separable(m=4)"))
        fit_layer("conv", conv, layer, window_covariance(layer, [x]) if informed else None)
        errors.append(relative_error(layer(x), conv(x)))
    assert errors[1] < errors[0]


def test_a_network_decomposed_on_images_keeps_more_of_its_output():
    torch.manual_seed(0)
    net = nn.Sequential(
        CONVS[0], nn.ReLU(), nn.Conv2d(12, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 4, 3)
    ).double()
    x, size = smooth_images(12), (8, 14, 14)
    blind = decompose(net, macs=0.4, input_size=size)
    seeing = decompose(net, macs=0.4, images=x[:8])
    errors = [output_error(outputs(new, [x[8:]]), outputs(net, [x[8:]])) for new in (blind, seeing)]
    assert errors[1] < errors[0]
    assert all(row.error is not None and 0 <= row.error < 1 for row in notes(seeing).decomposition)
    assert notes(blind).decomposition[0].error is None


def test_a_score_chooses_where_filters_go():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2)).double()

    def first_matters(model: nn.Module) -> float:
        return 1 - 0.9 * (not isinstance(model[0], nn.Conv2d))

    new = decompose(net, macs=0.6, input_size=(8, 10, 10), evaluate=first_matters)
    assert isinstance(new[0], nn.Conv2d)
    with pytest.raises(LowRankError, match="evaluate gives a number"):
        decompose(net, macs=0.6, input_size=(8, 10, 10), evaluate=lambda model: "good")


def test_modes_and_hooks_are_left_as_they_were():
    net = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12)).double().train()
    before = copy.deepcopy(net.state_dict())
    decompose(net, "separable(m=4)", images=smooth_images())
    assert all(module.training and not module._forward_hooks for module in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_batches_come_with_labels_or_without():
    net, x = nn.Conv2d(8, 4, 3), smooth_images()
    pairs = image_batches([(x[:2], torch.zeros(2)), x[2:]], net)
    assert [len(batch) for batch in pairs] == [2, 4]
    assert pairs[0].dtype == torch.float32
    assert len(seen(net, net, pairs)) == 2


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([], "no images"),
        (["a"], "are a tensor"),
        (TensorDataset(torch.zeros(4, 8, 9, 9)), "a Dataset gives single images"),
        (torch.full((2, 8, 5, 5), torch.nan), "not finite"),
        (torch.zeros(2, 3, 9, 9), "does not run on images of"),
    ],
)
def test_bad_images_are_refused_in_a_sentence(images: object, says: str):
    with pytest.raises(LowRankError, match=says):
        decompose(nn.Sequential(nn.Conv2d(8, 12, 3)), "separable(m=4)", images=images)


class TwoHeads(nn.Module):
    """Two outputs, and a layer that the second alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.classes = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        x = self.body(x).relu()
        return {"loss": None, "boxes": self.boxes(x), "classes": [self.classes(x), torch.ones(2).long()]}


def test_every_output_counts_when_layers_compete():
    """By the first output alone, the second head would be worth nothing, and lose nearly all of its filters."""
    torch.manual_seed(0)
    net, x = TwoHeads().double(), smooth_images()
    new = decompose(net, macs=0.6, images=x)
    ranks = {row.name: row.m for row in notes(new).decomposition}
    assert ranks.get("classes", 8) >= 4, ranks
    boxes, classes = outputs(net, [x, x])
    assert boxes.shape == classes.shape == (2 * x.numel(),)
    assert output_error([boxes, 2 * classes], [boxes, classes]) == pytest.approx(0.5)
    assert output_error([boxes[1:], classes], [boxes, classes]) == float("inf")
