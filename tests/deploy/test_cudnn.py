"""A conv and its ReLU by one call of cuDNN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.blocks import Block, find_blocks
from lowrank_cnn.deploy.candidates import merged_by_cudnn
from lowrank_cnn.deploy.cudnn import CudnnConv2d, cudnn_conv_relu
from lowrank_cnn.models import create_model

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_off_the_gpu_it_is_no_way():
    block = Block("conv", nn.Conv2d(8, 8, 3), relu=True)
    assert merged_by_cudnn(block) is None


@pytest.mark.parametrize(("stride", "padding", "size"), [((1, 1), (1, 0), (7, 7)), ((2, 1), (0, 0), (3, 5))])
def test_the_compiler_is_told_the_shape(stride, padding, size):
    x, weight = torch.empty(2, 8, 7, 7, device="meta"), torch.empty(16, 8, 3, 3, device="meta")
    if padding == (1, 0):
        weight = torch.empty(16, 8, 3, 1, device="meta")
    y = cudnn_conv_relu(x, weight, None, list(stride), list(padding))
    assert y.shape == (2, 16, *size)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_what_is_exported_is_torchs_own():
    conv = nn.Conv2d(8, 16, 3, padding=1).eval()
    x = torch.randn(2, 8, 6, 6)
    program = torch.export.export(CudnnConv2d(conv, nn.MaxPool2d(2)).eval(), (x,))
    assert not [node for node in program.graph.nodes if "cudnn" in str(node.target)]
    assert torch.equal(program.module()(x), nn.functional.max_pool2d(conv(x).relu(), 2))


@GPU
@pytest.mark.parametrize("name", ["vgg11-gmp", "vgg11-gmp-lr-join", "vgg11-gmp-sf"])
def test_against_float64(name):
    net = create_model(name, num_classes=10, width=0.25).eval().to(memory_format=torch.channels_last)
    block = find_blocks(net)[2]
    assert block.relu
    x = torch.randn(2, 32, 12, 12)
    with torch.no_grad():
        net.bfloat16().double()
        right = nn.Sequential(*block.modules)(x.bfloat16().double())
        net.cuda().bfloat16()
        way = merged_by_cudnn(block)
        assert way is not None
        ours = way(x.cuda().bfloat16().contiguous(memory_format=torch.channels_last))
    assert (ours.double().cpu() - right).norm() <= 1e-2 * right.norm()
