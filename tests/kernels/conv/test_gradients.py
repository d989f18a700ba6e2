"""Which kernels compute the gradients of a problem on which GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv import gradients
from lowrank_cnn.kernels.problem import pose

PADDING = (((1, 1), (0, 0)), ((0, 0), (1, 1)))


def test_only_hopper_has_its_own_gradient_of_the_weights(monkeypatch):
    from lowrank_cnn.kernels.conv import backward, hopper_weights

    taken = []
    found = [torch.zeros(16, 16, 3, 3)] * 2
    monkeypatch.setattr(hopper_weights, "launch_weights_hopper", lambda *_: taken.append("hopper") or found)
    monkeypatch.setattr(backward, "launch_weight_gradient", lambda *rest: taken.append(rest[-1].stages))
    wide = pose((2, 16, 6, 5), [(16, 16, 3, 1), (16, 16, 1, 3)], torch.bfloat16, stride=(1, 1), padding=PADDING)
    narrow = pose((2, 8, 6, 5), [(8, 8, 3, 1), (8, 8, 1, 3)], torch.float32, stride=(1, 1), padding=PADDING)
    for capability, posed in [((9, 0), wide), ((9, 0), narrow), ((10, 0), wide), ((8, 0), wide)]:
        monkeypatch.setattr(gpu, "capability_of", lambda _, capability=capability: capability)
        gradients.weight_gradient(posed, torch.zeros(1), torch.zeros(1))
    assert taken == ["hopper", 1, 1, 3]


def test_groups_of_different_lengths_have_the_gradient_of_hopper_too(monkeypatch):
    from lowrank_cnn.kernels.conv import hopper_weights

    longer = [torch.randn(16, 16, 3, 3), torch.randn(16, 16, 3, 1)]
    monkeypatch.setattr(hopper_weights, "launch_weights_hopper", lambda *_: longer)
    monkeypatch.setattr(gpu, "capability_of", lambda _: (9, 0))
    sides = (((1, 1), (1, 1)), ((0, 0), (0, 0)))
    half = pose((2, 16, 6, 5), [(16, 16, 3, 3), (16, 16, 1, 1)], torch.bfloat16, stride=(1, 1), padding=sides)
    first, second = gradients.weight_gradient(half, torch.zeros(1), torch.zeros(1))
    assert torch.equal(first, longer[0])
    assert torch.equal(second, longer[1][:, :, 1:2])


def test_only_hopper_has_the_gradient_over_windows(monkeypatch):
    from lowrank_cnn.kernels.conv import stem
    from lowrank_cnn.kernels.conv import window as window_gradient

    taken = []
    found = ([], torch.zeros(1))
    monkeypatch.setattr(window_gradient, "launch_window_gradient", lambda *_: taken.append("window") or found)
    monkeypatch.setattr(stem, "launch_stem_gradient", lambda *_: taken.append("stem") or found)
    for capability, channels in [((9, 0), 3), ((9, 0), 4), ((8, 0), 3)]:
        monkeypatch.setattr(gpu, "capability_of", lambda _, capability=capability: capability)
        first = pose(
            (1, channels, 4, 4), [(16, channels, 3, 3)], torch.bfloat16,
            stride=(1, 1), padding=[((1, 1), (1, 1))], relu=True, pool="floor",
        )  # fmt: skip
        x, grad = torch.zeros(1, channels, 4, 4), torch.zeros(1, 16, 2, 2)
        gradients.compute_gradients(first, grad, x, [], torch.zeros(1, 2, 2, 16), need_input=False)
    assert taken == ["window", "stem", "stem"]
