import pytest
import torch
from torch import nn

from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose, fit_layer


def trained(seed: int = 0, **options) -> nn.Sequential:
    torch.manual_seed(seed)
    first = nn.Conv2d(4, 12, 3, **{"padding": 1, **options})
    second = nn.Conv2d(12, 8, (3, 5), padding="same", bias=False)
    return nn.Sequential(first, nn.ReLU(), second).double()


@pytest.mark.parametrize("scheme", ["lr-join(m=60)", "mixture(kx1, 1xk, kxk, join, m=90)"])
def test_a_grouped_conv_is_fitted_group_by_group(scheme: str):
    net = trained(groups=2)
    with torch.no_grad():
        net[0].weight[:, :, ::2, ::2] = 0
    new = decompose(net, scheme, where="0", allow_costlier=True)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x), rtol=0, atol=1e-6)
    assert notes(new).decomposition[0].energy == pytest.approx(1)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_single_basis_filter_is_enough_to_fit(padding: int):
    (row,) = notes(decompose(nn.Sequential(nn.Conv2d(3, 8, 3, padding=padding)), "lr-join(m=1)")).decomposition
    assert (row.m, 0 < row.energy < 1) == (1, True)


def test_convert_takes_the_fit_as_its_init():
    net = trained()
    new = convert(net, "separable(m=64)", init=fit_layer, allow_costlier=True)
    x = torch.randn(1, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(new(x), net(x))
