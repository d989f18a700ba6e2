import io

import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.blocks import Epilogue, ForCalls, as_network, in_blocks, max_pool
from lowrank_cnn.kernels.problem import activate
from lowrank_cnn.models import create_model

RELU = "relu"


def test_a_block_takes_the_relu_and_the_pool_behind_its_layer():
    net = create_model("vgg11-gmp-lr", width=0.05).eval()
    x = torch.randn(1, 3, 64, 64)
    network, blocks, captured = in_blocks(net, x)
    found = {block.name: block.epilogue for block in blocks}
    assert len(found) == 8
    assert captured.calls is None
    first, third = found["features.conv1_1"], found["features.conv3_1"]
    assert (first.activation, third.activation, third.pool) == (RELU, RELU, None)
    assert isinstance(first.pool, nn.MaxPool2d)
    torch.testing.assert_close(network(x), net(x))


def test_a_block_reaches_across_what_does_nothing_in_evaluation():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.Dropout(), nn.ReLU(), nn.Sigmoid(), nn.MaxPool2d(2))
    _, (block,), _ = in_blocks(net.eval(), torch.randn(1, 3, 8, 8))
    assert (block.epilogue.activation, block.epilogue.pool) == (RELU, None)


def test_a_shared_layer_is_no_block():
    conv = nn.Conv2d(3, 3, 3)
    assert in_blocks(nn.Sequential(conv, nn.ReLU(), conv).eval(), torch.randn(1, 3, 8, 8))[1] == []


def test_a_network_captured_for_one_size_leaves_other_sizes_to_the_original():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            y = self.conv(x) * scale
            return torch.relu(y) if y.shape[2] > 4 else y * 2

    net = Looks().eval()
    large, small = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 6, 6)
    network, _, captured = in_blocks(net, large)
    whole = as_network(network, captured, net)
    assert isinstance(whole, ForCalls)
    for x in (large, small):
        torch.testing.assert_close(whole(x), net(x))
        torch.testing.assert_close(whole(x, scale=3.0), net(x, scale=3.0))


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
    assert torch.equal(Epilogue(RELU, pool)(x.clone()), pool(x.relu()))


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "silu", "gelu", "hardswish"])
@pytest.mark.parametrize("pool", [None, nn.MaxPool2d(2)])
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 1, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_an_epilogue_adds_activates_and_pools_in_order(name: str, pool, shape: tuple[int, ...], last: bool):
    y, residual = torch.randn(2, 3, 8, 8), torch.randn(shape)
    expected = activate(y, name) + residual if last else activate(y + residual, name)
    expected = expected if pool is None else pool(expected)
    kept = residual.clone()
    epilogue = Epilogue(name, pool, True, last)
    assert str(epilogue).startswith(name if last else "add")
    for finish in (epilogue, epilogue.in_order):
        torch.testing.assert_close(finish(y.clone(), residual), expected)
    assert torch.equal(residual, kept)


def test_a_rewritten_network_can_be_saved():
    network, _, _ = in_blocks(create_model("nin-c3-lr", width=0.05).eval(), torch.randn(1, 3, 32, 32))
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), network(x))
