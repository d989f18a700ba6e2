"""What the fused kernels can run, and why not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels import unsupported
from lowrank_cnn.kernels.autotune.tuned import Request, plans_of, refusal
from lowrank_cnn.kernels.problem import pose

CPU = torch.device("cpu")


def problem(channels=8, dtype=torch.float32, stride=(1, 1), **options):
    shapes, sides = [(8, channels, 3, 1), (8, channels, 1, 3)], [((1, 1), (0, 0)), ((0, 0), (1, 1))]
    return pose((2, channels, 6, 5), shapes, dtype, stride=stride, padding=sides, **options)


@pytest.mark.parametrize(
    ("posed", "training", "why"),
    [
        (problem(), True, None),
        (problem(dtype=torch.float64), False, "float64 is not"),
        (problem(residual=True), False, None),
        (problem(residual=True), True, "no gradient for a residual"),
        (problem(activation="silu"), True, "no gradient for a residual or for this activation"),
        (problem(activation="silu", pool="floor"), False, "no kernel takes"),
    ],
)
def test_reasons(posed, training, why):
    found = unsupported(posed, CPU, training=training)
    assert found == why if why is None else why in found


def test_an_old_gpu_and_exact_float32_are_refused(monkeypatch):
    cuda = torch.device("cuda:7")
    monkeypatch.setattr(gpu, "capability_of", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert "older" in refusal(Request(problem(), cuda))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert refusal(Request(problem(), cuda)) == "float32 without TF32"


def test_the_input_of_a_first_layer_needs_no_gradient():
    first = problem(3, stride=(3, 3))
    assert unsupported(first, CPU, training=True, need_input=False) is None
    assert "no gradient for" in unsupported(first, CPU, training=True)


def test_plans_have_a_default():
    assert plans_of(problem(3), CPU)[0].kernel == "stem"
    assert plans_of(problem(64), CPU)[0].kernel == "tiled"
