"""The forward by gathering against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.conv import gather
from lowrank_cnn.kernels.conv.pack import pack_union
from lowrank_cnn.kernels.problem import ConvTensors
from tests.kernels.helpers import FIRST_LAYERS

LOW_RANK = [(3, 1, 16), (1, 3, 8)]


@pytest.mark.parametrize(("size", "groups", "options"), FIRST_LAYERS)
def test_gather(layers, monkeypatch, size, groups, options):
    layers.poison(monkeypatch, gather)
    x, weights, bias, problem, exact, _ = layers.posed(size, groups, **options)
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    tile = gather.GatherTile(pixels=32, filters=16, depth=16)
    layers.assert_agrees(gather.launch_gather(problem, ConvTensors(x, packed, bias), tile), exact, x.dtype)


def test_gather_takes_many_channels_at_stride_two(layers):
    x, weights, bias, problem, exact, _ = layers.posed((1, 20, 7, 6), LOW_RANK, stride=(2, 2), relu=True)
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    layers.assert_agrees(
        gather.launch_gather(problem, ConvTensors(x, packed, bias), gather.GatherTile(pixels=16, filters=32)),
        exact,
        x.dtype,
    )


def test_it_has_no_codes(layers):
    x, weights, bias, problem, *_ = layers.posed((1, 3, 6, 6), LOW_RANK, pool="floor")
    packed = pack_union(weights, problem, gather.gathered_values(problem), x.dtype)
    with pytest.raises(LowRankError, match="no gradient for a pool"):
        gather.launch_gather(problem, ConvTensors(x, packed, bias, codes=torch.empty(0)))
