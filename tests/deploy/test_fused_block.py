import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.block_forms import FusedBlock
from lowrank_cnn.deploy.blocks import BlockAsGiven, Epilogue
from lowrank_cnn.method.schemes import build_conv

POOLS = [None, nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True)]


@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join", "separable"])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu:0.1", "silu"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("residual", "last"), [(None, False), ((2, 8, 7, 5), False), ((1, 8, 1, 1), False), ((2, 8, 7, 5), True)]
)
def test_a_fused_block_computes_what_the_block_does(scheme: str, activation, pool, residual, last: bool):
    layer = build_conv(4, 8, 3, scheme, stride=2).double().eval()
    epilogue = Epilogue(activation, pool, residual is not None, last)
    x = torch.randn(2, 4, 14, 10, dtype=torch.float64)
    inputs = (x,) if residual is None else (x, torch.randn(residual, dtype=torch.float64))
    block = FusedBlock.of(layer, epilogue)
    assert block is not None
    with torch.no_grad():
        torch.testing.assert_close(block(*inputs), BlockAsGiven(layer, epilogue)(*inputs))


def test_a_residual_of_another_size_is_refused():
    block = FusedBlock.of(nn.Conv2d(4, 8, 3), Epilogue(adds=True))
    with pytest.raises(RuntimeError):
        block(torch.randn(1, 4, 8, 8), torch.randn(1, 8, 5, 5))


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2)])
def test_what_the_kernels_do_not_know_is_no_fused_block(conv: nn.Module):
    assert FusedBlock.of(conv, Epilogue("relu")) is None
