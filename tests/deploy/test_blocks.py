import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.blocks import find_blocks, finish, max_pool
from lowrank_cnn.models import create_model


def test_a_block_takes_the_relu_and_the_pool_behind_its_layer():
    blocks = {block.name: block for block in find_blocks(create_model("vgg11-gmp-lr", width=0.05).eval())}
    assert len(blocks) == 8
    first, third = blocks["features.conv1_1"], blocks["features.conv3_1"]
    assert first.relu
    assert isinstance(first.pool, nn.MaxPool2d)
    assert first.rest == ("features.conv1_1_relu", "features.pool1")
    assert third.relu
    assert third.pool is None


def test_a_block_reaches_across_what_does_nothing_in_evaluation():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.Dropout(), nn.ReLU(), nn.Sigmoid(), nn.MaxPool2d(2))
    (block,) = find_blocks(net.eval())
    assert (block.relu, block.pool, block.rest) == (True, None, ("1", "2", "3"))


def test_a_shared_layer_is_no_block():
    conv = nn.Conv2d(3, 3, 3)
    assert find_blocks(nn.Sequential(conv, nn.ReLU(), conv).eval()) == []


@pytest.mark.parametrize("size", [(8, 6), (7, 6), (9, 9)])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d((2, 2), (2, 2), padding=1),
        nn.MaxPool2d(2, dilation=2),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pools_are_torchs_own_to_the_bit(size: tuple[int, int], pool: nn.MaxPool2d, layout: torch.memory_format):
    x = torch.randn(2, 3, *size).contiguous(memory_format=layout)
    assert torch.equal(max_pool(x, pool), pool(x))
    assert torch.equal(finish(x.clone(), relu=True, pool=pool), pool(x.relu()))
