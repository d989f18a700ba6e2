"""Steps of the plain kernels behind the matrix product, each in a kernel of its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowrank_cnn.kernels.conv.tiled import activated, activation_options, without_codes
from lowrank_cnn.kernels.problem import ACTIVATIONS, activate, parsed, pose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def activate_all(x, y, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    lane = tl.arange(0, 64)
    tl.store(y + lane, activated(tl.load(x + lane), ACTIVATION, SLOPE))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu:0.3", None])
def test_activations_are_those_of_torch(activation):
    x = torch.linspace(-6, 6, 64, device=DEVICE)
    y = torch.full_like(x, torch.nan)
    name, slope = parsed(activation)
    activate_all[(1,)](x, y, ACTIVATION=name, SLOPE=slope)
    assert torch.allclose(y.double(), activate(x.double(), activation), atol=2e-6)


@triton.jit
def split(x, y, codes):
    lane = tl.arange(0, 4)
    best, code = without_codes(tl.load(x + lane), True)
    tl.store(y + lane, best)
    tl.store(codes + lane, code)


def test_codes_are_taken_off_the_lowest_bits():
    place = torch.arange(4, dtype=torch.int32, device=DEVICE)
    value = torch.tensor([0.0, 1.0, -2.0, 4.0], device=DEVICE)
    x = (value.view(torch.int32) & ~3 | 3 - place).view(torch.float32)
    y, codes = torch.empty_like(x), torch.empty_like(place)
    split[(1,)](x, y, codes)
    assert torch.equal(y, value)  # a zero is a zero again
    assert torch.equal(codes, place)


def test_the_options_of_a_problem():
    problem = pose((1, 8, 4, 4), [(8, 8, 1, 1)], torch.float32, stride=(1, 1), padding=[((0, 0), (0, 0))],
                   activation="leaky_relu:0.2")  # fmt: skip
    assert activation_options(problem) == {"ACTIVATION": "leaky_relu", "SLOPE": 0.2}
