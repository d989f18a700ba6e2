"""How a first layer of stride 2 is divided for the overlap kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.overlap_plan import OverlapTile, fetched_rows, reach_of, slabs_of, unsupported
from lowrank_cnn.kernels.problem import pose

LOW_RANK = [(7, 1, 16), (1, 7, 16)]


def problem(groups):
    shapes = [(f, 3, h, w) for h, w, f in groups]
    padding = [((h // 2, h // 2), (w // 2, w // 2)) for h, w, _ in groups]
    return pose((1, 3, 32, 32), shapes, torch.bfloat16, stride=(2, 2), padding=padding)


def test_slabs_cover_every_block_once():
    """A low-rank stem needs 7 products of 16 values instead of the 16 of a dense one."""
    low_rank, dense = map(problem, (LOW_RANK, [(7, 7, 16)]))
    assert len(slabs_of(low_rank)) == 7
    assert len(slabs_of(dense)) == 16
    assert reach_of(dense) == reach_of(low_rank)
    assert fetched_rows(dense, OverlapTile(4)) == 16
    pooled = replace(dense, pool="3x3/2")
    assert fetched_rows(pooled, OverlapTile(4)) == 24


@pytest.mark.parametrize(
    "change",
    [{"stride": (2, 1)}, {"pool": "floor"}, {"residual": True}, {"channels": 5}, {"dtype": torch.float32}],
)
def test_it_refuses_the_rest(change):
    assert unsupported(problem(LOW_RANK)) is None
    assert unsupported(replace(problem(LOW_RANK), **change)) is not None
