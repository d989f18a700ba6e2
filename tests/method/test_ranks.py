"""Curves offer whole units of filters where a layer is wide."""

from dataclasses import replace

import pytest
from torch import nn

from lowrank_cnn.method.decompose import WHOLE, curves_of
from lowrank_cnn.method.schemes import parse_scheme


@pytest.mark.parametrize("scheme", ["separable", "lr-join", "mixture(kx1=2, 1xk=1, join)"])
def test_filters_come_whole_where_a_layer_is_wide_and_singly_where_it_is_narrow(scheme: str):
    chosen = parse_scheme(scheme)
    for channels, whole in ((256, True), (8, False)):
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        found, _ = curves_of(nn.Sequential(conv), {"0": conv}, chosen, (channels, 8, 8))
        sizes = [step.scheme.m for step in found["0"] if step.scheme]
        assert sizes[0] == 1  # however little there is to spend
        taken = [replace(chosen, m=m).stages((3, 3), channels)[0] for m in sizes if m >= 3 * WHOLE or not whole]
        assert all(group.filters % WHOLE == 0 for basis in taken for group in basis.groups) is whole
        assert [step.cost for step in found["0"]] == sorted({step.cost for step in found["0"]})
