import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.models.airbench import PatchConv2d, begin_as_identity_


def test_the_first_filters_of_a_conv_pass_their_inputs_on():
    conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)
    begin_as_identity_(conv)
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(conv(x)[:, :4], x)
    assert conv.weight[4:].abs().min() > 0


@pytest.mark.parametrize(("channels", "scheme"), [(4, "lr"), (8, "lr"), (8, "mixture(kx1, 1xk, kxk=2)")])
def test_the_first_filters_of_a_composite_pass_their_inputs_on(channels: int, scheme: str):
    layer = lr.build_conv(channels, 8, 3, scheme, bias=False)
    begin_as_identity_(layer)
    x = torch.randn(2, channels, 5, 5)
    torch.testing.assert_close(layer(x)[:, :channels], x)


def test_scales_of_norms_are_fixed_and_their_shifts_are_not():
    net = lr.create_model("airbench", width=0.25)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 6
    assert not any(norm.weight.requires_grad for norm in norms)
    assert all(norm.bias.requires_grad for norm in norms)


def test_a_thinner_one_keeps_a_whitening_filter_for_each_direction():
    new = lr.thin(lr.create_model("airbench"), width=0.5, input_size=(3, 32, 32))
    first = next(m for m in new.modules() if isinstance(m, PatchConv2d))
    assert first.weight.shape == (24, 3, 2, 2)
    assert new.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize("scheme", ["lr", "lr-join", "separable", "mixture(kx1=3, 1xk=3, kxk=2, join)", "embed"])
def test_the_network_takes_any_scheme_and_any_image_of_nine_pixels(scheme: str):
    net = lr.create_model("airbench", scheme=scheme, width=0.25, in_channels=1).eval()
    assert net(torch.randn(2, 1, 9, 9)).shape == (2, 10)
    with pytest.raises(lr.LowRankError, match="9x9 at least"):
        net(torch.randn(2, 1, 8, 8))
