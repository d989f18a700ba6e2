"""Gradients of strided convs, parity by parity, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import equivalent as fold
from lowrank_cnn.kernels.conv import equivalent as stride_parity
from lowrank_cnn.kernels.conv import gradients
from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference
from tests.kernels.helpers import same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 2e-3 if DEVICE == "cuda" else 1e-5


def assert_gradients_agree(size, groups, stride):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=draw).to(DEVICE)
    weights = [torch.randn(f, size[1], h, w, generator=draw).to(DEVICE) for h, w, f in groups]
    options = {"stride": stride, "padding": [same(h, w) for h, w, _ in groups]}
    wide = [t.double().requires_grad_() for t in (x, *weights)]
    y = composite_reference(wide[0], wide[1:], None, **options)
    grad = torch.randn(y.shape, generator=draw).to(DEVICE)
    exact = torch.autograd.grad(y, wide, grad.double())
    seen = x.new_empty(0, dtype=torch.uint8)
    dx, dw, _ = gradients.compute_gradients(
        describe(x, weights, **options), grad, x, weights, seen, need_input=True, need_bias=False
    )
    for found, right in zip((dx, *dw), exact, strict=True):
        assert torch.linalg.vector_norm(found - right) <= LIMIT * torch.linalg.vector_norm(right).clamp_min(1e-6)


SIZES = st.tuples(st.integers(1, 2), st.sampled_from([64, 80]), st.integers(3, 9), st.integers(3, 9))
GROUPS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([4, 8, 24])), min_size=1, max_size=3
)


def _fails(*_):
    raise AssertionError("pixels were copied")


@given(SIZES, st.sampled_from([(2, 2), (2, 1), (1, 2), (3, 2)]), GROUPS)
@settings(max_examples=10)
def test_any_groups_and_strides(size, stride, groups):
    # Groups of one size of result: a filter and its own padding keep it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "fold_pixels", _fails)
        assert_gradients_agree(size, groups, stride)


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        pytest.param((2, 64, 8, 8), [(3, 1, 16), (1, 3, 16)], id="as a residual block begins"),
        pytest.param((1, 64, 7, 9), [(1, 1, 32)], id="its shortcut, where most pixels have no gradient"),
        pytest.param((1, 64, 6, 5), [(3, 1, 8), (1, 1, 12), (1, 3, 8)], id="members that are no neighbours"),
    ],
)
def test_the_layers_of_residual_networks(size, groups, monkeypatch):
    monkeypatch.setattr(fold, "fold_pixels", _fails)
    assert_gradients_agree(size, groups, (2, 2))


def test_every_tap_reads_one_parity():
    x, weights = torch.zeros(1, 64, 8, 8), [torch.zeros(8, 64, 3, 1), torch.zeros(8, 64, 1, 3)]
    problem = describe(x, weights, stride=(2, 2), padding=[same(3, 1), same(1, 3)])
    found = {
        conv.parity: [(g.height, g.width) for g in conv.problem.groups]
        for conv in stride_parity.parity_convs(problem)
    }
    assert found == {(0, 0): [(1, 1), (1, 1)], (0, 1): [(1, 2)], (1, 0): [(2, 1)]}


def test_what_no_view_can_be_fetched_of():
    weights = [torch.zeros(8, 6, 3, 3)]
    problem = describe(torch.zeros(1, 6, 8, 8), weights, stride=(2, 2), padding=[same(3, 3)])
    assert "16 bytes" in (stride_parity.parity_unsupported(problem) or "")
