import pytest
import torch
from torch import nn

from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.report.network_figures import filter_banks, mosaic


@pytest.mark.parametrize("scheme", ["lr-join", "mixture(kx1, 1xk, kxk, join)", "separable"])
def test_the_combined_filters_are_what_the_chain_computes(scheme: str):
    conv = build_conv(3, 6, (3, 5), scheme, bias=False).double()
    image = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    dense = nn.functional.conv2d(image, conv.weight, padding=(1, 2))  # type: ignore[arg-type]
    torch.testing.assert_close(conv(image), dense)


def test_the_banks_of_a_first_layer():
    def banks(scheme: str) -> list[str]:
        return [bank.title for bank in filter_banks(build_conv(3, 8, 3, scheme))]

    times = "\N{MULTIPLICATION SIGN}"
    assert banks("dense") == [f"3{times}3"]
    assert banks("lr") == [f"vertical 3{times}1", f"horizontal 1{times}3"]
    assert banks("lr-join") == [f"vertical 3{times}1", f"horizontal 1{times}3", "combined by the join"]
    assert banks("separable") == [f"horizontal 1{times}3", "the two halves combined"]


def test_a_mosaic_is_white_where_a_cross_has_nothing():
    cross = torch.zeros(1, 3, 3, 3)
    cross[:, :, 1, :] = 1.0
    cross[:, :, :, 1] = -1.0
    image = mosaic(cross)
    assert image.shape == (3, 3, 3)
    assert image[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert image[0, 1].tolist() == [0.0, 0.0, 0.0]
    cross[:, :, 1, 0] = 2.0
    assert mosaic(cross)[1, 0].max() < 0.95  # and not where it has most
