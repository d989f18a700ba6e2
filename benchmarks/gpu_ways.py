"""The ways to run a network on a GPU that `gpu_speed.py` compares: ours, and the fastest dense ones.

Each way gives a function that does one inference or one training step on fixed memory, to be captured as a CUDA
graph: all ways are timed as graphs, so none pays for launches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_floor import made
from lowrank_cnn.deploy.blocks import CANDIDATES
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.fuse import freeze, fuse
from lowrank_cnn.kernels.device import for_graphs, forced
from lowrank_cnn.kernels.fused_convs import FusedComposite
from lowrank_cnn.models.network import Network

Step = Callable[[], object]

RIVALS = {
    "inference": ("cudnn-padded", "cudnn", "compile", "max-autotune"),
    "training": ("compile-padded", "compile", "graph", "max-autotune"),
}
"""Ways of the dense twin, without our kernels: usually the fastest first, the longest to compile last."""

TRICKS = {"inference": ("ours",), "training": ("ours",)}
"""The dense twin with our own kernels."""

OURS = ("fused", "planned", "fused-compiled")
PLANNED = ("as given", "fused", "merged, fused")
"""The ways that a plan chooses from; the compiled rivals cover torch's own ways."""


@torch.library.custom_op("gpu_speed::conv_relu", mutates_args=())
def conv_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """cuDNN's convolution with bias and ReLU inside, opaque to the compiler, which would split it."""
    return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)


@conv_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    height, width = ((x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in range(2))
    y = x.new_empty((x.shape[0], height, width, weight.shape[0]))
    return y.permute(0, 3, 1, 2)


class TorchConv(nn.Module):
    """A conv of few channels, its ReLU and its pool as torch's own operations, for the compiler to fuse."""

    def __init__(self, layer: FusedComposite) -> None:
        super().__init__()
        self.weight, self.bias = layer.weights[0], layer.bias
        self.stride, self.pool = list(layer.stride), layer.pool
        rows, columns = layer.padding[0]
        self.padding = [rows[0], columns[0]]

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.weight, self.bias, self.stride, self.padding))
        return F.max_pool2d(y, 2, 2, ceil_mode=self.pool == "ceil") if self.pool else y


class CudnnConv(nn.Module):
    """A conv and its ReLU by cuDNN, the pool after it as an operation of its own; `pad` adds empty channels."""

    def __init__(self, layer: FusedComposite, pad: int) -> None:
        super().__init__()
        weight = layer.weights[0].detach()
        self.pad = pad
        weight = F.pad(weight, (0, 0, 0, 0, 0, pad)) if pad else weight
        self.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
        self.bias = layer.bias
        self.stride, self.pool = list(layer.stride), layer.pool
        rows, columns = layer.padding[0]
        self.padding = [rows[0], columns[0]]

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, self.pad)) if self.pad else x
        x = x.contiguous(memory_format=torch.channels_last)
        y = conv_relu(x, self.weight, self.bias, self.stride, self.padding)
        return F.max_pool2d(y, 2, 2, ceil_mode=self.pool == "ceil") if self.pool else y


class PaddedConv(nn.Conv2d):
    """A conv of few channels as one of eight, which cuDNN has faster kernels for."""

    def forward(self, x: Tensor) -> Tensor:
        pad = (0, 0, 0, 0, 0, -self.in_channels % 8)
        x = F.pad(x, pad).contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, F.pad(self.weight, pad), self.bias, self.stride, self.padding)


def with_padding(net: nn.Module) -> nn.Module:
    """The same network with its first conv padded."""
    for module in net.modules():
        if type(module) is nn.Conv2d and module.in_channels % 8:
            module.__class__ = PaddedConv
    return net


def with_cudnn(model: nn.Module, *, padded: bool) -> nn.Module:
    """A copy of a dense network whose convs with a ReLU are cuDNN's; few channels are padded, or left to torch."""
    twin = fuse(model)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, FusedComposite) or child.activation != "relu" or child.bias is None:
                continue
            ragged = -child.weights[0].shape[1] % 8
            parent._modules[name] = TorchConv(child) if ragged and not padded else CudnnConv(child, ragged)
    return twin


def network(name: str, mode: str) -> Network:
    """A network on the GPU, channels_last: in bf16 for inference, in fp32 to be trained under autocast."""
    torch.manual_seed(0)
    net = made(name).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net.train() if mode == "training" else net.eval().bfloat16().requires_grad_(False)


def images(net: Network, batch: int) -> Tensor:
    x = torch.randn((batch, *net.input_size), device="cuda", dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


def way(net: nn.Module, how: str, x: Tensor) -> nn.Module:
    """The network as a way runs it on such images; compiled ones compile at their first step."""
    ours = fuse if net.training else freeze
    if how == "planned":
        with for_graphs():  # as the whole is captured, so its parts are chosen
            return plan(net, x, cache=False, candidates={name: CANDIDATES[name] for name in PLANNED}, repeats=5)
    if how in ("ours", "fused"):
        return ours(net)
    if how == "fused-compiled":
        return torch.compile(ours(net))  # type: ignore[return-value]
    if how.startswith("cudnn"):
        return torch.compile(with_cudnn(net, padded=how == "cudnn-padded"))  # type: ignore[return-value]
    if how == "compile-padded":
        return torch.compile(with_padding(net))  # type: ignore[return-value]
    if how == "max-autotune":
        return torch.compile(net, mode="max-autotune-no-cudagraphs")  # type: ignore[return-value]
    return torch.compile(net) if how == "compile" else copy.copy(net)  # type: ignore[return-value]


def step_of(net: Network, how: str, mode: str, batch: int) -> Step:
    """One step of a network by a way, on images and labels that stay where they are."""
    x = images(net, batch)
    run = way(net, how, x)
    kernels = "auto" if how in (*OURS, "ours") else "off"
    step = partial(_infer, run, x)
    if mode != "inference":
        labels = torch.randint(0, int(str(net.config["num_classes"])), (batch,), device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4, fused=True)
        step = partial(_train, run, x, labels, optimizer)

    def with_kernels() -> Tensor:
        with forced(kernels):
            return step()

    return with_kernels


def _infer(run: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return run(x)


def _train(run: nn.Module, x: Tensor, labels: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        given = run(x)
    main, *auxiliary = given if isinstance(given, tuple) else (given,)
    loss = F.cross_entropy(main.float(), labels)
    for logits in auxiliary:
        loss = loss + 0.3 * F.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    return loss
