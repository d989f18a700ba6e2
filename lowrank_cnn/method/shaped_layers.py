"""Layers whose filters choose their shapes while they train.

A `ShapedConv2d` has one weight, in the kernel that encloses every shape. Each filter has a shape, and computes
with the taps inside it alone.

A filter can also be removed: the layers that read its channel then ignore it, by a mask on their inputs. Reading
layers hold that mask, not the norm between, so that removing the channel is exact whatever activation follows.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.reference import conv_on_sides, pad_on_sides
from lowrank_cnn.method.geometry import ConvForm, form_of, offsets, recentred
from lowrank_cnn.method.schemes import NONE, Learned, Scheme, resolve_shape
from lowrank_cnn.method.spec import Kernel


class ShapedConv2d(nn.Module):
    """A conv each of whose filters has one of several shapes.

    - `choice`: for each filter the index of its shape in `starts`: one of `shapes`, or all taps that any shape or
      the dense kernel has, which a filter begins with. These have the size of the enclosing kernel.
    - `kept`: False for a filter that was removed.
    - `inputs`: False for an input channel that was removed.
    """

    choice: Tensor
    kept: Tensor
    inputs: Tensor
    masks: Tensor

    def __init__(self, form: ConvForm, scheme: Scheme) -> None:
        super().__init__()
        if form.groups != 1:
            raise LowRankError("shapes are learned by convolutions without channel groups.")
        self.form, self.scheme = form, scheme
        self.in_channels, self.out_channels, self.stride = form.in_channels, form.out_channels, form.stride
        self.shapes = shapes_of(scheme, form.kernel)
        every = (*self.shapes, form.kernel)
        self.kernel_size = max(h for h, _ in every), max(w for _, w in every)
        self.starts = tuple(dict.fromkeys((*self.shapes, self.kernel_size)))
        self.padding = recentred(form.padding, form.kernel, self.kernel_size, form.dilation)
        self.weight = nn.Parameter(torch.zeros(form.out_channels, form.in_channels, *self.kernel_size))
        self.bias = nn.Parameter(torch.zeros(form.out_channels)) if form.bias else None
        start = self.starts.index(self.kernel_size)
        self.register_buffer("choice", torch.full((form.out_channels,), start, dtype=torch.long))
        self.register_buffer("kept", torch.ones(form.out_channels, dtype=torch.bool))
        self.register_buffer("inputs", torch.ones(form.in_channels, dtype=torch.bool))
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
        mask = self.masks[self.choice][:, None] * self.inputs[:, None, None].to(self.masks.dtype)
        return self.weight * mask

    def taps_of(self, filters: Tensor, shape: Kernel) -> Tensor:
        """The weights of some filters, cut to a shape."""
        taps = self.weight.detach()[filters] * self.masks[self.starts.index(shape)]
        return taps[:, :, *self._window(shape)]

    @torch.no_grad()
    def shrink_outside(self, share: float) -> None:
        """Shrink the taps outside each filter's shape by a share, and use all taps again.

        All taps of a removed filter shrink.
        """
        outside = 1 - self.masks[self.choice] * self.kept[:, None, None]
        self.weight.mul_(1 - share * outside[:, None])
        self.choice.fill_(self.starts.index(self.kernel_size))
        self.kept.fill_(True)
        self.inputs.fill_(True)

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


class GatedLinear(nn.Module):
    """A linear layer that ignores the features of removed channels."""

    inputs: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.register_buffer("inputs", torch.ones(in_features, dtype=torch.bool))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.inputs.to(self.weight.dtype), self.bias)

    @torch.no_grad()
    def copy_dense(self, weight: Tensor, bias: Tensor | None) -> None:
        """Start as a plain linear layer."""
        self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)


def shaped_convs(network: nn.Module) -> dict[str, ShapedConv2d]:
    """The convs of a network that learn shapes, by name."""
    return {name: m for name, m in network.named_modules() if isinstance(m, ShapedConv2d)}


def shapes_of(scheme: Scheme, kernel: Kernel) -> tuple[Kernel, ...]:
    """The shapes that a `learned` scheme offers the filters of a kernel, each once, in its order."""
    return tuple(dict.fromkeys(resolve_shape(shape, kernel) for shape, _ in scheme.shapes if shape != NONE))


def may_remove(scheme: Scheme) -> bool:
    """Whether a `learned` scheme may remove filters."""
    return any(shape == NONE for shape, _ in scheme.shapes)


def shaped_layer(layer: nn.Module, scheme: Scheme) -> nn.Module:
    """Build what replaces a layer; `learned` takes convs, and linear layers that read channels.

    Its weights are set later.
    """
    if not isinstance(scheme, Learned):
        return scheme.build(layer)
    if isinstance(layer, nn.Linear):
        return GatedLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    form = form_of(layer) if isinstance(layer, nn.Conv2d) else None
    if form is None:
        raise LowRankError(f"a {type(layer).__name__} cannot learn the shapes of its filters.")
    return ShapedConv2d(form, scheme)


def exact_scheme(groups: list[tuple[Kernel, int]], inputs: int | None = None) -> Scheme:
    """The scheme of filters that are counted by shape."""
    shapes = tuple((f"{h}x{w}", Fraction(count)) for (h, w), count in groups)
    return Scheme("exact", shapes, inputs=inputs)
