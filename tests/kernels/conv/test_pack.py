"""Weights in the layouts of the kernels, and back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.pack import (
    laid_out,
    pack_rows,
    pack_turned,
    pack_union,
    union_taps,
    unpack_rows,
    unpack_union,
)
from lowrank_cnn.kernels.problem import describe

PADDING = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


def posed(channels=3):
    weights = [torch.randn(4, channels, 3, 1), torch.randn(6, channels, 1, 3)]
    return weights, describe(torch.empty(1, channels, 5, 5), weights, stride=(1, 1), padding=PADDING)


def test_rows_are_packed_by_group_tap_and_filter():
    weights, problem = posed()
    rows = pack_rows(weights, torch.float32)
    assert rows.shape == (3 * 4 + 3 * 6, 3)
    assert torch.equal(rows[4:8], weights[0][:, :, 1, 0])
    assert all(torch.equal(a, b) for a, b in zip(unpack_rows(rows, problem), weights, strict=True))


def test_weights_that_are_laid_out_are_not_copied():
    weights, _ = posed()
    parts = laid_out(weights, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(parts, weights, strict=True))
    assert pack_rows(parts, torch.float32).data_ptr() == parts[0].data_ptr()
    assert pack_rows(parts, torch.float16).data_ptr() != parts[0].data_ptr()


def test_the_union_holds_every_tap_once():
    weights, problem = posed()
    assert union_taps(problem.groups) == [(-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)]
    matrix = pack_union(weights, problem, 16, torch.float32)
    assert matrix.shape == (16, 10)
    assert matrix[3:6, :4].eq(0).all()  # the first group reads no pixel to the left
    assert torch.equal(matrix[:3, :4], weights[0][:, :, 0, 0].T)
    assert all(torch.equal(a, b) for a, b in zip(unpack_union(matrix.T, problem), weights, strict=True))


def test_turned_weights_have_their_lead_of_zeros():
    weights, _ = posed()
    rows = pack_turned(weights, [0, 2], torch.float32)
    assert rows.shape == (18, 8)
    assert torch.equal(rows[3:6, :4], weights[0][:, :, 1, 0].T)
    assert rows[9:, :2].eq(0).all()
    assert torch.equal(rows[9:12, 2:], weights[1][:, :, 0, 0].T)
