"""How NiN's class maps start, and its pools."""

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model


@pytest.mark.parametrize("init", ["composite", "torch"])
@pytest.mark.parametrize("name", ["nin", "nin-c3", "nin-c3-lr"])
def test_no_class_starts_dark(name, init):
    torch.manual_seed(0)
    network = create_model(name, init=init).eval()
    maps = network.features(torch.randn(4, 3, 30, 30))
    assert ((maps > 0).float().mean(dim=(0, 2, 3)) > 0.2).all()
    assert network(torch.randn(4, 3, 30, 30)).std() < 1


def test_plain_logits_need_no_lift():
    network = create_model("nin-c3-lr", norm="batch")
    assert network.features.classes.bias.detach().abs().max() == 0
    assert network.features.classes.weight.detach().std() == pytest.approx(192**-0.5, rel=0.1)


def test_the_second_pool_may_average():
    paper, averaged = (create_model("nin-c3-lr", width=0.1, pool=pool) for pool in (None, "average"))
    assert isinstance(paper.features.pool2, nn.MaxPool2d)
    assert isinstance(averaged.features.pool1, nn.MaxPool2d)
    assert isinstance(averaged.features.pool2, nn.AvgPool2d)
    assert count(paper, (3, 32, 32)).macs == count(averaged, (3, 32, 32)).macs
    assert isinstance(create_model(**averaged.config).features.pool2, nn.AvgPool2d)


def test_windows_over_the_border_average_what_is_there():
    pool = create_model("nin", width=0.1, pool="average").features.pool2
    assert (pool(torch.ones(1, 2, 8, 7)) == 1).all()


def test_a_pool_that_is_none_is_refused():
    for name, pool, says in (("nin", "mean", "None .* or 'average'"), ("vgg11", "average", "vgg11 has none")):
        with pytest.raises(LowRankError, match=says):
            create_model(name, pool=pool)
