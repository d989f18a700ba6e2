"""A batch norm goes into the layer before it, exactly, along the axis that has the layer's filters."""

import copy

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.graph.merge import FoldedLinear, channel_axis, fold, fold_error
from lowrank_cnn.method.schemes import build_conv

CASES = [
    (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 6)),
    (nn.Conv3d(3, 4, 3, bias=False), nn.BatchNorm3d(4, affine=False), (2, 3, 5, 5, 5)),
    (nn.Linear(3, 4), nn.BatchNorm1d(4), (2, 3)),
    (nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (nn.ConvTranspose2d(6, 4, 3, 2, groups=2, dilation=2, bias=False), nn.BatchNorm2d(4), (2, 6, 5, 6)),
    (nn.ConvTranspose2d(4, 8, 2, 2, groups=4), nn.BatchNorm2d(8, affine=False), (2, 4, 5, 6)),
    (nn.ConvTranspose1d(3, 4, 4, 2), nn.BatchNorm1d(4), (2, 3, 6)),
    (nn.ConvTranspose3d(4, 2, 2, groups=2), nn.BatchNorm3d(2), (2, 4, 3, 3, 3)),
    (build_conv(3, 4, 3, "lr"), nn.BatchNorm2d(4), (2, 3, 6, 6)),
    (build_conv(3, 4, 3, "lr-join"), nn.BatchNorm2d(4), (2, 3, 6, 6)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), CASES)
def test_a_norm_folds_exactly(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]):
    layer, norm = copy.deepcopy(layer).double(), copy.deepcopy(norm).double().eval()
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    folded = fold(copy.deepcopy(layer), norm)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(folded(x), norm(layer(x)), rtol=0, atol=1e-12)
    assert fold_error(layer, norm, folded) < 1e-12
    nn.init.constant_(folded.bias if hasattr(folded, "bias") else list(folded)[-1].bias, 9.0)
    assert fold_error(layer, norm, folded) > 0.1


def test_filters_lie_along_the_axis_before_the_pixels():
    assert channel_axis(nn.Conv2d(3, 4, 3), 4) == 1
    assert channel_axis(nn.Conv2d(3, 4, 3), 3) == 0
    assert channel_axis(nn.Linear(3, 4), 3) == 2


def test_what_was_folded_for_vectors_refuses_sequences():
    assert FoldedLinear()(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(LowRankError, match="two dimensions, not of 3"):
        FoldedLinear()(torch.ones(2, 3, 4))
