"""Blocks of neighbouring results: their windows, and results and gradients of any geometry against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowrank_cnn.kernels.autotune import tuned
from lowrank_cnn.kernels.conv import gradients, toeplitz
from lowrank_cnn.kernels.conv.forward import run_plan
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.problem import pixels_last
from tests.kernels.helpers import DEVICE, assert_close, posed

TILE = toeplitz.ToeplitzTile(16)


def assert_right(layer):
    problem = layer.problem
    y = run_plan(KernelPlan("toeplitz", TILE), problem, layer.x, layer.weights, layer.bias)
    assert_close(y, layer.right)
    last = (pixels_last(t) for t in (layer.x, layer.grad, layer.right.float()))
    dw, db = toeplitz.launch_toeplitz_gradient(problem, *last)
    for ours, exact in zip([db, *dw], layer.gradients[1:], strict=True):
        assert_close(ours, exact)


SIZES = st.tuples(st.integers(1, 2), st.sampled_from([1, 3, 5, 16]), st.integers(5, 8), st.integers(5, 18))
GROUPS = st.lists(st.tuples(st.integers(1, 4), st.integers(2, 5), st.integers(1, 9)), min_size=1, max_size=2)


@given(SIZES, GROUPS, st.sampled_from([(1, 1), (2, 2), (1, 3)]))
@settings(max_examples=3)
def test_any_geometry(size, groups, stride):
    assert_right(posed(size, groups, relu=True, stride=stride))


@given(st.integers(1, 8), st.integers(3, 12), st.tuples(*[st.tuples(st.integers(-2, 3), st.integers(-2, 3))] * 2))
@settings(max_examples=3)
def test_any_padding(channels, width, padding):
    assert_right(posed((1, channels, 6, width + 4), [(3, 3, 6)], relu=True, padding=[padding]))


@pytest.mark.parametrize(
    ("channels", "groups", "stride"),
    [(3, [(5, 5, 192)], 1), (3, [(3, 1, 96), (1, 3, 40)], 2), (16, [(3, 3, 130)], 1)],
)
def test_more_filters_than_a_product_is_wide(channels, groups, stride):
    layer = posed((1, channels, 5, 9), groups, relu=True, stride=(stride, stride))
    window = toeplitz.window_of(layer.problem)
    assert window is not None
    assert window.filters < layer.problem.filters
    assert_right(layer)


def test_programs_that_take_several_boxes(monkeypatch):
    monkeypatch.setattr(toeplitz, "PROGRAMS", 1)
    monkeypatch.setattr(toeplitz.gpu, "multiprocessors", lambda _: 1)
    layer = posed((2, 3, 9, 33), [(3, 3, 16)], relu=True)
    assert_right(layer)
    assert toeplitz._division(layer.problem, layer.x, TILE, 1, 16)[2]["ROUNDS"] > 1


@pytest.mark.parametrize(
    ("size", "groups", "stride", "results", "depth", "lanes"),
    [
        ((1, 3, 224, 224), [(7, 7, 16)], 1, 4, 32, 64),  # 30 values in 4 results of 7 taps
        ((1, 16, 224, 224), [(3, 3, 16)], 1, 4, 96, 64),
        ((1, 16, 224, 224), [(3, 3, 32)], 2, 1, 48, 32),  # 3 taps of 16 values, none multiplied by zero
        ((1, 3, 224, 224), [(7, 7, 64)], 2, 2, 32, 128),
    ],
)
def test_the_window_of_a_block(size, groups, stride, results, depth, lanes):
    problem = replace(posed((1, size[1], 8, 8), groups, stride=(stride, stride)).problem, dtype=torch.bfloat16)
    window = toeplitz.window_of(problem)
    assert window is not None
    assert (window.results, window.depth, window.lanes) == (results, depth, lanes)
    # One packed copy of the weights serves every size of the image.
    assert window == toeplitz.window_of(replace(problem, batch=9, height=224, width=223))


def test_a_first_layer_of_many_taps_trains_by_it(monkeypatch):
    asked = []
    launch = toeplitz.launch_toeplitz_gradient
    monkeypatch.setattr(toeplitz, "launch_toeplitz_gradient", lambda *given: asked.append(given) or launch(*given))
    layer = posed((1, 3, 9, 9), [(7, 7, 6)], relu=True)  # six filters: no other kernel has a gradient
    assert tuned.unsupported(layer.problem, DEVICE, training=True, need_input=False) is None
    seen = pixels_last(layer.right.float())
    _, dw, db = gradients.compute_gradients(
        layer.problem, layer.grad, layer.x, layer.weights, seen, need_input=False
    )
    assert len(asked) == 1
    assert db is not None
    for ours, exact in zip([db, *dw], layer.gradients[1:], strict=True):
        assert_close(ours, exact)


@pytest.mark.parametrize("groups", [[(3, 3, 12)], [(3, 1, 8), (1, 3, 4)]])
def test_both_gradients_of_few_channels_read_windows(monkeypatch, groups):
    asked = []
    gradient = toeplitz.launch_toeplitz_gradient
    monkeypatch.setattr(
        toeplitz, "launch_toeplitz_gradient", lambda *given: asked.append(given) or gradient(*given)
    )
    monkeypatch.setattr(gradients, "run_plan", lambda plan, *given: asked.append(plan) or run_plan(plan, *given))
    layer = posed((2, 16, 9, 11), groups, activation="relu", dtype=torch.float16)
    seen = pixels_last(layer.right.half())
    dx, dw, db = gradients.compute_gradients(
        layer.problem, layer.grad, layer.x, layer.weights, seen, need_input=True
    )
    assert len(asked) == 2
    for ours, exact in zip([dx, db, *dw], layer.gradients, strict=True):
        assert_close(ours, exact, limit=1e-2)
