"""The input on which a transformed network is compared: the user's, the size that is known, or one that runs."""

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.examples import example_for
from lowrank_cnn.method.schemes import build_conv


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3)), (2, 3, 32, 32)),
        (nn.Sequential(build_conv(5, 4, 3, "lr")), (2, 5, 32, 32)),
        (nn.Sequential(nn.Conv2d(3, 4, 40)), (2, 3, 64, 64)),
        (nn.Sequential(nn.Conv3d(3, 4, 3)), (2, 3, 16, 16, 16)),
        (nn.Sequential(nn.Linear(7, 2)), (2, 7)),
    ],
)
def test_a_size_is_found_that_the_network_takes(net: nn.Module, shape: tuple[int, ...]):
    (x,) = example_for(net.double(), None)
    assert (tuple(x.shape), x.dtype) == (shape, torch.float64)


def test_a_known_size_is_the_only_guess():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    note(net, input_size=(3, 11, 13))
    assert example_for(net, None)[0].shape == (2, 3, 11, 13)
    note(net, input_size=(3, 2, 2))
    assert example_for(net, None) is None
    assert example_for(nn.Identity(), None) is None


@pytest.mark.parametrize("transform", [plan, optimize])
def test_too_few_repeats_are_refused_before_anything_runs(transform):
    with pytest.raises(
        LowRankError, match=r"^repeats, .*, must be a number of at least 3 and at most .*, not 2\.$"
    ):
        transform(nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 8, 8), repeats=2)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan")])
def test_a_budget_without_time_is_refused(seconds: float):
    with pytest.raises(LowRankError, match=rf"^budget, in seconds, must be a number above 0, not {seconds}\.$"):
        optimize(nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 8, 8), budget=seconds)
