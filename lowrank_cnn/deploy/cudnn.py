"""A dense conv with its bias and ReLU in one call of cuDNN, for inference on a GPU.

At one image, where a launch weighs as much as its MACs, this is the way of a dense conv to beat.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("lowrank::cudnn_conv_relu", mutates_args=())
def cudnn_conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    """cuDNN's own, opaque to torch.compile, which would take it apart."""
    return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)


@cudnn_conv_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    height, width = ((x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in range(2))
    return x.new_empty((x.shape[0], height, width, weight.shape[0])).permute(0, 3, 1, 2)


class CudnnConv2d(nn.Module):
    """A conv and its ReLU by cuDNN, the max-pool behind them by torch."""

    def __init__(self, conv: nn.Conv2d, pool: nn.MaxPool2d | None) -> None:
        super().__init__()
        self.weight, self.bias, self.pool = conv.weight, conv.bias, pool
        self.stride, self.padding = list(conv.stride), [int(side) for side in conv.padding]

    @staticmethod
    def takes(conv: nn.Module | None) -> bool:
        """Only convs whose channels fill the matrix unit's reads; others are no gain."""
        return (
            isinstance(conv, nn.Conv2d)
            and conv.weight.is_cuda
            and torch.version.hip is None
            and torch.backends.cudnn.is_available()
            and conv.weight.dtype in (torch.bfloat16, torch.float16)
            and conv.in_channels % 8 == 0
            and (conv.groups, conv.dilation, conv.padding_mode) == (1, (1, 1), "zeros")
            and not isinstance(conv.padding, str)
        )

    def forward(self, x: Tensor) -> Tensor:
        if _exporting() or not x.is_cuda:
            y = functional.conv2d(x, self.weight, self.bias, self.stride, self.padding).relu()
        else:
            y = cudnn_conv_relu(x, self.weight, self.bias, self.stride, self.padding)
        return y if self.pool is None else self.pool(y)


def _exporting() -> bool:
    """Asked another way while torch.compile traces, which in torch 2.11 takes the question itself for a yes."""
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import tracing

        return tracing.exporting()
    return torch.compiler.is_exporting()
