"""Layers whose filters choose their shapes while they train.

A `ShapedConv2d` has one weight, in the kernel that encloses every shape. Each filter has a shape, and computes
with the taps inside it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.reference import conv_on_sides, pad_on_sides
from lowrank_cnn.method.layers import ConvForm, offsets, recentred
from lowrank_cnn.method.spec import Kernel, resolve_shape

if TYPE_CHECKING:
    from lowrank_cnn.method.schemes import Scheme


class ShapedConv2d(nn.Module):
    """A conv each of whose filters has one of several shapes.

    - `choice`: for each filter the index of its shape in `starts`: one of `shapes`, or all taps that any shape or
      the dense kernel has, which a filter begins with. These have the size of the enclosing kernel.
    """

    choice: Tensor
    masks: Tensor

    def __init__(self, form: ConvForm, scheme: Scheme) -> None:
        super().__init__()
        if form.channel_groups != 1:
            raise LowRankError("shapes are learned by convolutions without channel groups.")
        self.form, self.scheme = form, scheme
        self.in_channels, self.out_channels, self.stride = form.in_channels, form.filters, form.stride
        self.shapes = tuple(dict.fromkeys(resolve_shape(shape, form.kernel) for shape, _ in scheme.shapes))
        every = (*self.shapes, form.kernel)
        self.kernel_size = max(h for h, _ in every), max(w for _, w in every)
        self.starts = tuple(dict.fromkeys((*self.shapes, self.kernel_size)))
        self.padding = recentred(form.padding, form.kernel, self.kernel_size, form.dilation)
        self.weight = nn.Parameter(torch.zeros(form.filters, form.in_channels, *self.kernel_size))
        self.bias = nn.Parameter(torch.zeros(form.filters)) if form.bias else None
        start = self.starts.index(self.kernel_size)
        self.register_buffer("choice", torch.full((form.filters,), start, dtype=torch.long))
        masks = torch.stack([self._mask(shape) for shape in self.starts])
        masks[start] = torch.stack([self._mask(shape) for shape in every]).amax(0)
        self.register_buffer("masks", masks, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.form.padding_mode != "zeros":
            x = pad_on_sides(input, list(self.padding), self.form.padding_mode)
            return F.conv2d(x, self.shaped_weight(), self.bias, self.stride, 0, self.form.dilation)
        options = list(self.padding), list(self.stride), list(self.form.dilation)
        return conv_on_sides(input, self.shaped_weight(), self.bias, *options)

    def shaped_weight(self) -> Tensor:
        """The weight with zeros outside the shapes."""
        return self.weight * self.masks[self.choice][:, None]

    def taps_of(self, filters: Tensor, shape: Kernel) -> Tensor:
        """The weights of some filters, cut to a shape."""
        taps = self.weight.detach()[filters] * self.masks[self.starts.index(shape)]
        return taps[:, :, *self._window(shape)]

    @torch.no_grad()
    def shrink_outside(self, share: float) -> None:
        """Shrink the taps outside each filter's shape by a share, and use all taps again."""
        self.weight.mul_(1 - share * (1 - self.masks[self.choice])[:, None])
        self.choice.fill_(self.starts.index(self.kernel_size))

    @torch.no_grad()
    def copy_dense(self, weight: Tensor, bias: Tensor | None) -> None:
        """Start as a dense conv; taps outside its kernel start at zero, and learn with the others."""
        self.weight.zero_()[:, :, *self._window(self.form.kernel)] = weight
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{h}x{w}" for h, w in self.shapes)
        return f"{self.in_channels}, {self.out_channels}, shapes=({shapes}), stride={self.stride}"

    def _mask(self, shape: Kernel) -> Tensor:
        mask = torch.zeros(self.kernel_size)
        mask[self._window(shape)] = 1
        return mask

    def _window(self, shape: Kernel) -> tuple[slice, slice]:
        """The rows and columns of the enclosing kernel that a shape covers."""
        top, left = offsets(shape, self.kernel_size)
        return slice(top, top + shape[0]), slice(left, left + shape[1])


def shaped_convs(network: nn.Module) -> dict[str, ShapedConv2d]:
    """The convs of a network that learn shapes, by name."""
    return {name: m for name, m in network.named_modules() if isinstance(m, ShapedConv2d)}
