import pytest
import torch
from torch import nn

from lowrank_cnn.system.compare import agree, difference, objection

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 3)


def test_the_difference_is_relative_to_the_right_result():
    assert difference(ONES * 1.5, ONES) == pytest.approx(0.5)
    assert difference(ONES * 1.5, ONES, by="norm") == pytest.approx(0.5)
    assert difference((ONES, {"a": 3 * ONES}), (ONES, {"a": 2 * ONES})) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("by", ["largest", "norm"])
def test_what_is_not_finite_never_agrees(bad: float, by):
    spoilt = ONES.clone()
    spoilt[0, 0] = bad
    for ours, right in ((spoilt, ONES), (ONES, spoilt), (spoilt, spoilt)):
        assert difference(ours, right, by=by) == INF
        assert not agree(ours, right, by=by)
        assert not agree([ONES, ours], [ONES, right], by=by)


def test_values_whose_norm_overflows_never_agree():
    huge = 1e200 * ONES.double()
    assert not agree([ONES, 2 * huge], [ONES, huge], by="norm")


@pytest.mark.parametrize(
    ("ours", "right"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(1, 3), torch.ones(3)),
        ((ONES,), [ONES]),
        ({"a": ONES}, {"b": ONES}),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (None, ONES),
        ((ONES, 1), (ONES, 2)),
        (object(), object()),
    ],
)
def test_other_shapes_structures_and_values_do_not_agree(ours, right):
    assert difference(ours, right) == INF


def test_precision_sets_the_limit():
    small = torch.full((4,), 1 + 1e-6)
    assert agree(small, torch.ones(4))
    assert not agree(small.double(), torch.ones(4).double())
    assert agree((1.01 * ONES).bfloat16(), ONES.bfloat16())
    assert agree(torch.zeros(3), torch.zeros(3))
    assert not agree(torch.full((3,), 1e-9), torch.zeros(3))


def test_networks_are_compared_on_more_than_zeros():
    net, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    other.load_state_dict({**net.state_dict(), "weight": 2 * net.weight})
    zeros = torch.zeros(1, 3, 8, 8)
    assert difference(other(zeros), net(zeros)) == 0
    assert "would differ" in objection(other, net, zeros)
    assert objection(net, net, zeros) == ""
    assert "it fails" in objection(nn.Conv2d(5, 4, 3), net, zeros)
