"""The forward of first layers against float64."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import stem
from lowrank_cnn.kernels.conv.gather import gathered_values
from lowrank_cnn.kernels.conv.pack import pack_union
from lowrank_cnn.kernels.problem import ConvTensors
from tests.kernels.helpers import FIRST_LAYERS


@pytest.mark.parametrize(("size", "groups", "options"), FIRST_LAYERS)
def test_stem(layers, monkeypatch, size, groups, options):
    layers.poison(monkeypatch, stem)
    x, weights, bias, problem, exact, _ = layers.posed(size, groups, **options)
    assert stem.unsupported(problem) is None
    packed = pack_union(weights, problem, gathered_values(problem), x.dtype)
    layers.assert_agrees(
        stem.launch_stem(problem, ConvTensors(x, packed, bias), stem.StemTile(pixels=32)), exact, x.dtype
    )


def test_it_refuses_many_values_and_many_filters(layers):
    assert "more than 64" in stem.unsupported(layers.posed((1, 16, 4, 4), [(3, 3, 8)])[3])
    assert "more than one program holds" in stem.unsupported(layers.posed((1, 3, 4, 4), [(3, 3, 264)])[3])
