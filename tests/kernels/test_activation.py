"""Activations by name: one spelling each, and what they compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.problem import activate, canonical, is_monotone, parsed


@pytest.mark.parametrize(
    ("given", "spelt"),
    [
        (None, None),
        ("", None),
        ("relu", "relu"),
        ("leaky_relu", "leaky_relu:0.01"),
        ("leaky_relu:0.10", "leaky_relu:0.1"),
    ],
)
def test_each_has_one_spelling(given, spelt):
    assert canonical(given) == spelt
    assert canonical(spelt) == spelt


def test_relu_is_short_for_its_name():
    assert canonical(None, True) == canonical("relu", True) == "relu"
    with pytest.raises(LowRankError, match="contradict"):
        canonical("gelu", True)


@pytest.mark.parametrize("name", ["tanh", "relu:1", "leaky_relu:", "leaky_relu:nan", "leaky_relu:steep"])
def test_another_name_is_refused(name):
    with pytest.raises(LowRankError, match="the activation is one of"):
        parsed(name)


@pytest.mark.parametrize("name", ["relu", "leaky_relu:0.2", "leaky_relu:-0.2", "silu", "gelu", "hardswish", None])
def test_a_monotone_one_may_follow_a_pool(name):
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    falls = bool((activate(x, name).diff() < 0).any())
    assert is_monotone(name) is not falls


def test_they_are_torchs():
    x = torch.randn(64, dtype=torch.float64)
    assert torch.equal(activate(x, "leaky_relu:0.3"), F.leaky_relu(x, 0.3))
    assert torch.equal(activate(x, "gelu"), F.gelu(x))
    assert activate(x, None) is x
