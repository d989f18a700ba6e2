"""Layers between convs that use the kernels if they can: batch norm with its activation, max-pool, response norm.

Otherwise they run by torch: without a GPU, under LOWRANK_KERNELS=off, in other types, and for torch.export, whose
result must run anywhere.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _pair

from lowrank_cnn.core.modules import is_plain
from lowrank_cnn.kernels.device import takes
from lowrank_cnn.kernels.problem import activate, canonical, parsed

WIDEST = 15
"""Rows or columns of the largest window: a place in it must fit in a byte."""
MOST_CHANNELS = 33
"""Channels of the largest window of a response norm: its sums stay in registers."""


class FusedNorm(nn.Module):
    """A batch norm, a residual that is added to its result, an activation by name, and a max-pool.

    With `add_last` the residual is added after the activation, as in Darknet.
    It shares parameters, statistics and mode with the norm that it replaces. With `twice` it returns the result
    twice, for two readers: the norm's gradient kernel then adds up their gradients.
    """

    norm: nn.BatchNorm2d

    def __init__(
        self,
        norm: nn.BatchNorm2d,
        activation: str | None = "relu",
        *,
        pool: FusedPool | None = None,
        add_last: bool = False,
    ) -> None:
        super().__init__()
        # The same dictionaries, so that a tensor replaced in one, as by a move to a device, is replaced in both.
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self.activation, self.pool, self.add_last = canonical(activation), pool, add_last
        self.twice = False
        self.__dict__["norm"] = norm  # not a submodule: its tensors are registered here already

    def train(self, mode: bool = True) -> FusedNorm:
        self.norm.train(mode)
        super().train(mode)
        return self

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        norm = self.norm
        if self.takes(x, residual):
            from lowrank_cnn.kernels.between.batch_statistics import batch_norm_statistics

            running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
            mean, rstd = batch_norm_statistics(x.detach(), *running, norm.momentum, norm.eps)
            return self.normalised(x, mean, rstd, residual)
        y = norm.forward(x)
        y = y if residual is None or self.add_last else y + residual
        y = activate(y, self.activation)
        y = y + residual if residual is not None and self.add_last else y
        y = y if self.pool is None else self.pool(y)
        return (y, y) if self.twice else y

    def takes(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Whether the kernels normalise `x` now: in training, with a residual of the same size and type."""
        norm = self.norm
        several = x.numel() > x.shape[1]  # torch refuses to normalise a single value
        alike = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
        return norm.training and norm.momentum is not None and several and kernels_take(x) and alike

    def normalised(self, x: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None) -> Any:
        """The result by the kernels, for given statistics of the batch."""
        from lowrank_cnn.kernels.between.normalise import TwiceRead, batch_norm_activation
        from lowrank_cnn.kernels.between.normalise_pool import batch_norm_relu_pool

        scales = (mean, rstd, self.norm.weight, self.norm.bias)
        if self.pool is not None and residual is None and self.activation == "relu" and self.pool.unrolls(x):
            codes = torch.is_grad_enabled() and x.requires_grad
            y = batch_norm_relu_pool(x, *scales, *self.pool.options(), codes)[0]
        else:
            inputs = (x, *scales, residual, *parsed(self.activation), self.add_last)
            # Not under torch.compile, which adds gradients in kernels of its own.
            if self.twice and self.pool is None and not torch.compiler.is_compiling():
                return TwiceRead.apply(*inputs)
            y = batch_norm_activation(*inputs)
            y = y if self.pool is None else self.pool(y)
        return (y, y) if self.twice else y

    def extra_repr(self) -> str:
        return f"{self.norm.extra_repr()}, {self.activation}, twice={self.twice}"


class NormedConv(nn.Module):
    """A conv and the norm after it, with the norm's residual, activation and pool.

    If the conv has `with_statistics`, its kernel computes mean and variance along with the result.
    """

    def __init__(self, conv: nn.Module, norm: FusedNorm) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        gathers = getattr(self.conv, "with_statistics", None)
        if gathers is None or not self.norm.takes(x):
            return self.norm(self.conv(x), residual)
        y, mean, variance = gathers(x)
        if mean is None or not self.norm.takes(y, residual):
            return self.norm(y, residual)
        from lowrank_cnn.kernels.between.batch_statistics import batch_norm_track

        norm = self.norm.norm
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        pixels = y.numel() // y.shape[1]
        rstd = batch_norm_track(mean, variance, *running, pixels, norm.momentum, norm.eps)
        return self.norm.normalised(y, mean, rstd, residual)


class FusedPool(nn.Module):
    """A max-pool without dilation."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = map(_pair, (pool.kernel_size, pool.stride, pool.padding))
        self.ceil = pool.ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        if not (kernels_take(x) and self._fits(x)):
            return F.max_pool2d(x, self.kernel, self.stride, self.padding, ceil_mode=self.ceil)
        from lowrank_cnn.kernels.between.pool import max_pool2d

        codes = torch.is_grad_enabled() and x.requires_grad
        return max_pool2d(x, *self.options(), codes)[0]

    def options(self) -> tuple[list[int], list[int], list[int], bool]:
        """Window, stride, padding and rounding, as arguments of the operators."""
        return list(self.kernel), list(self.stride), list(self.padding), self.ceil

    def unrolls(self, x: Tensor) -> bool:
        """Whether the kernel that normalises and pools in one pass supports these windows."""
        from lowrank_cnn.kernels.between.normalise_pool import MOST_PLACES

        return self._fits(x) and self.kernel[0] * self.kernel[1] <= MOST_PLACES

    def _fits(self, x: Tensor) -> bool:
        """Whether every window overlaps the image; if not, torch raises the error."""
        sides = zip(x.shape[2:], self.kernel, self.padding, strict=True)
        return all(2 * pad <= kernel <= min(WIDEST, size + 2 * pad) for size, kernel, pad in sides)

    def extra_repr(self) -> str:
        return f"{self.kernel}, stride={self.stride}, padding={self.padding}, ceil={self.ceil}"


class FusedResponseNorm(nn.Module):
    """A local response norm.

    Under autocast torch's own returns float32. The kernels compute in float32 too, but return the input's type, to
    which the next conv would round anyway.
    """

    def __init__(self, norm: nn.LocalResponseNorm) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = norm.size, float(norm.alpha), float(norm.beta), float(norm.k)

    def forward(self, x: Tensor) -> Tensor:
        if not kernels_take(x):
            return F.local_response_norm(x, self.size, self.alpha, self.beta, self.k)
        from lowrank_cnn.kernels.between.response_norm import local_response_norm

        return local_response_norm(x, self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


def kernels_take(x: Tensor) -> bool:
    """Whether the kernels between convs run now, on tensors like `x`."""
    # index() turns symbolic sizes of torch.compile into numbers: the answer holds for one size.
    asked = tuple(map(index, x.shape)), x.dtype, x.device
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import torch_compile

        return not torch_compile.exporting() and torch_compile.takes(*asked)
    return not torch.compiler.is_exporting() and takes(*asked)


def fused_pool(module: nn.Module) -> FusedPool | None:
    """A plain max-pool as a layer that uses the kernels; None for anything else."""
    if not isinstance(module, nn.MaxPool2d) or not is_plain(module, nn.MaxPool2d):
        return None
    if module.return_indices or _pair(module.dilation) != (1, 1):
        return None
    return FusedPool(module)


def fused_neighbour(module: nn.Module) -> FusedPool | FusedResponseNorm | None:
    """A plain max-pool or local response norm as a layer that uses the kernels; None for anything else."""
    if not isinstance(module, nn.LocalResponseNorm) or not is_plain(module, nn.LocalResponseNorm):
        return fused_pool(module)
    # With a denominator below zero torch still computes integer powers; the kernels do not.
    fits = 0 < module.size <= MOST_CHANNELS and module.alpha >= 0 and module.k >= 0
    return FusedResponseNorm(module) if fits else None
