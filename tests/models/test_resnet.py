import pytest
import torch

import lowrank_cnn as lr
from lowrank_cnn.method.rewrite import low_rank_layers


def test_the_dense_networks_cost_what_resnet18_costs():
    large, small = (lr.create_model(name) for name in ("resnet18", "resnet18-small"))
    published, stem, classes = 1_814_073_344, 112 * 112 * 147 * 64, 512 * 1000  # as torchvision's
    assert lr.count(large, large.input_size).macs == published
    blocks = (published - stem - classes) * 64**2 // 56**2  # the same, on maps of 64 pixels and not 56
    assert lr.count(small, small.input_size).macs == blocks + 64 * 64 * 27 * 64 + classes


@pytest.mark.parametrize("width", [0.3, 0.58, 0.685, 1.71])
def test_filters_come_in_sixteens_at_every_width(width: float):
    with torch.device("meta"):
        net = lr.create_model("resnet18-small", width=width)
    filters = [m.out_channels for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert all(n % 16 == 0 and n > 0 for n in filters)
    assert abs(filters[-1] / 512 - width) <= 8 / 512


def test_low_rank_in_the_late_stages_leaves_the_early_ones_dense():
    with torch.device("meta"):
        everywhere, late = (lr.create_model(f"resnet18-small-lr{where}") for where in ("", "-late"))
    assert len(low_rank_layers(everywhere)) == 17
    assert {name.split(".")[1] for name in low_rank_layers(late)} == {"stage3", "stage4"}


def test_a_thin_resnet_has_fewer_channels_in_every_sum():
    net = lr.create_model("resnet18-small", num_classes=7)
    thin = lr.thin(net, macs=0.4, input_size=(3, 32, 32)).eval()
    ratio = lr.count(thin, (3, 32, 32)).macs / lr.count(net, (3, 32, 32)).macs
    assert 0.35 < ratio < 0.45
    assert thin(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_embed_is_refused_where_maps_are_added():
    with pytest.raises(lr.LowRankError, match="equal width"):
        lr.create_model("resnet18", scheme="embed")
