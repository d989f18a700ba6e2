"""The profile of a training step covers its convs, and its parts add up."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from torch import nn


def test_a_step_is_the_sum_of_its_kernels(benchmark_module: Callable[[str], ModuleType]):
    profiled = benchmark_module("training_profile").profiled
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    found = profiled(net, 4, size=(3, 8, 8), steps=2, classes=3)
    calls = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
    assert sum(count for name, count in calls.items() if "convolution" in name) >= 2  # forward and backward
    assert 0 < sum(kernel["ms"] for kernel in found["kernels"]) <= found["ms"] * 1.001
