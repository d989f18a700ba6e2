"""All groups in one dense weight: the same as by torch's own operations, and gradients that are cut back."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.kernels.ops import enclose, place_groups, take_groups
from lowrank_cnn.kernels.reference import enclosed
from tests.kernels.helpers import DEVICE, assert_well_formed, same

CASES = [
    pytest.param([(3, 3, 4), (1, 1, 6)], None, id="half"),
    pytest.param([(3, 1, 4), (1, 3, 4), (1, 1, 4), (3, 3, 4)], None, id="quarters"),
    pytest.param([(3, 1, 2), (1, 3, 2), (1, 1, 2), (3, 3, 2), (5, 1, 2)], None, id="more than one launch copies"),
    pytest.param([(2, 2, 3), (3, 1, 5)], [((1, 0), (0, 1)), ((0, 2), (0, 0))], id="uneven sides"),
    pytest.param([(3, 3, 4), (1, 1, 4)], [((2, 2), (0, 1)), ((1, 1), (-1, 0))], id="cropped"),
]


def layer(groups, padding, **options):
    weights = [torch.randn(f, 8, h, w, device=DEVICE, requires_grad=True, **options) for h, w, f in groups]
    return weights, padding or [same(h, w) for h, w, _ in groups]


@pytest.mark.parametrize(("groups", "padding"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_and_gradients_are_those_of_torch(groups, padding, dtype):
    weights, padding = layer(groups, padding, dtype=dtype)
    (ours, sides), (right, wanted) = enclose(weights, padding), enclosed(weights, padding)
    assert sides == wanted
    assert torch.equal(ours, right)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(right)
    found, exact = (torch.autograd.grad(whole, weights, grad) for whole in (ours, right))
    for mine, theirs, weight in zip(found, exact, weights, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == weight.stride()


def test_the_operators_are_well_formed():
    weights, _ = layer([(3, 3, 4), (1, 1, 6)], None)
    assert_well_formed(place_groups, (weights, [0, 0, 1, 1], [3, 3]), gradients=True)
    whole = torch.randn(10, 8, 3, 3, device=DEVICE)
    assert_well_formed(take_groups, (whole, [w.detach() for w in weights], [0, 0, 1, 1]), gradients=False)
