import pytest
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.paper.audit import PADDED, build_rival, count_padded_googlenet, count_row
from lowrank_cnn.paper.published import published, rows


@pytest.mark.parametrize("name", PADDED)
def test_padded_max_pools_give_the_published_counts_of_the_low_rank_googlenets(name: str):
    cost = count_padded_googlenet(name)
    assert (cost.macs, cost.params) == (published()[name].macs, published()[name].params)


def test_the_dense_googlenet_was_counted_without_that_padding():
    assert count_row(published()["googlenet"]).macs == published()["googlenet"].macs
    assert count_padded_googlenet("googlenet").macs > published()["googlenet"].macs


def test_every_row_can_be_counted():
    assert all(count_row(row).macs > 0 for row in rows())


def test_rivals_are_known_by_name():
    vgg, size = build_rival("vgg19")
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in vgg) == 19
    assert size == (3, 224, 224)
    with pytest.raises(LowRankError, match="did you mean alexnet"):
        build_rival("alexnett")
