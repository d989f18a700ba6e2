"""What a network keeps when one of its layers is decomposed, measured on images."""

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.activations import output_error, outputs
from lowrank_cnn.method.ranks import data_fitted, measured_keeps
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.schemes import parse_scheme

SEPARABLE = parse_scheme("separable")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1)]
    return nn.Sequential(*layers).double().eval()


IMAGES = [torch.randn(8, 4, 10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


def test_refitting_on_images_loses_less_at_the_output():
    model, scheme = net(), parse_scheme("separable(m=6)")
    right = outputs(model, IMAGES)
    errors = []
    seen = [(model[:2](x), model(x)) for x in IMAGES]
    for given in ([], seen):
        layer = data_fitted("2", model[2], scheme, given)
        errors.append(output_error(outputs(copy_with(model, {model[2]: layer}), IMAGES), right))
    assert errors[1] < 0.9 * errors[0]


def test_a_score_decides_where_it_is_given_and_must_be_a_number():
    model = net()
    keeps = measured_keeps(model, {"0": model[0]}, SEPARABLE, [], lambda network: 0.5)
    assert keeps["0"](4) == pytest.approx(1.0)
    with pytest.raises(LowRankError, match="evaluate gives a number"):
        measured_keeps(model, {"0": model[0]}, SEPARABLE, [], lambda network: "good")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("score", [0.0, -1.5, float("inf")])
def test_shares_of_a_score_need_a_positive_one(score: float):
    """A share of a negative loss would be larger for a worse network."""
    model = net()
    with pytest.raises(LowRankError, match="a score is positive"):
        measured_keeps(model, {"0": model[0]}, SEPARABLE, [], lambda network: score)
