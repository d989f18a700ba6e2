"""The composite layer: filter groups of several shapes over one input.

State dict of `CompositeConv2d` and `CompositeConv3d` (stable): `weights.I` for group I, of shape [filters,
in_channels / channel_groups, *kernel], in the order of the groups, and `bias` in the order of the outputs: by
channel group, and within one by group. Depthwise filters are [filters, 1, height, width]; an identity has no
weight, and I does not count it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.prune import BasePruningMethod

from lowrank_cnn.core.errors import LowRankError, check_choice, check_number
from lowrank_cnn.core.modules import computes_as
from lowrank_cnn.core.text import counted
from lowrank_cnn.kernels import composite_conv2d, depthwise_conv2d, explain_call, explain_depthwise
from lowrank_cnn.kernels.depthwise.plan import Band
from lowrank_cnn.kernels.reference import conv_on_sides, interleaved, pad_on_sides, placed, ungrouped
from lowrank_cnn.kernels.volumes import composite_conv3d, explain_volume
from lowrank_cnn.method.spec import Composite, FilterGroup, Kernel, Pair

# Kernels, offsets and padding per axis, for filters of several sizes on one output grid.

Sides = tuple[Pair, ...]
"""Padding as ((top, bottom), (left, right)), before these in time over volumes; a negative side crops."""

Padding = str | int | Sequence[int] | Sides


def per_axis(value: int | Sequence[int], label: str, axes: int = 2) -> Kernel:
    """A size given once or per axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(sizes) != axes or any(not isinstance(v, int) or v < 1 for v in sizes):
        several = "a pair" if axes == 2 else "three"
        raise LowRankError(f"{label} is a positive number or {several} of them, not {value!r}.")
    return sizes


def enclosing_padding(padding: Padding, kernel: Kernel, dilation: Kernel) -> Sides:
    """Any way of writing the padding, as sides. "same" splits an odd total as torch does: less before."""
    if padding == "same":
        totals = (step * (size - 1) for size, step in zip(kernel, dilation, strict=True))
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    several = isinstance(padding, Sequence) and not isinstance(padding, str)
    axes: tuple[Any, ...] = tuple(padding) if several else (padding,) * len(kernel)  # type: ignore[arg-type]
    if any(isinstance(v, int) and v < 0 for v in axes):
        raise LowRankError(f"padding cannot be negative: {padding!r}.")
    sides = tuple(tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v, v) for v in axes)
    twos = [len(side) for side in sides] == [2] * len(kernel)
    if not twos or not all(isinstance(v, int) for side in sides for v in side):
        numbers = "a pair" if len(kernel) == 2 else "three"
        raise LowRankError(f'padding is "same", "valid", a number or {numbers}, not {padding!r}.')
    return sides  # type: ignore[return-value]


def offsets(own: Kernel, kernel: Kernel) -> Kernel:
    """Taps of the enclosing kernel before the own one's first, per axis: centre taps (k-1)//2 coincide."""
    return tuple((k - 1) // 2 - (n - 1) // 2 for n, k in zip(own, kernel, strict=True))


def centred(weight: Tensor, kernel: Kernel) -> Tensor:
    """A weight with zeros around it, or cut, to another kernel with the same centre."""
    return placed(weight, kernel, offsets(weight.shape[2:], kernel))


def recentred(sides: Sides, kernel: Kernel, enclosing: Kernel, dilation: Kernel) -> Sides:
    """The padding of the dense kernel, for an enclosing kernel of another size on the same output grid."""
    shift = offsets(kernel, enclosing)
    return tuple(
        (before + step * first, after + step * (new - old - first))
        for (before, after), old, new, step, first in zip(sides, kernel, enclosing, dilation, shift, strict=True)
    )


KINDS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Layers that can be replaced by others."""


def is_torch_layer(layer: nn.Module) -> bool:
    """Whether a layer computes what torch's layer of its kind computes."""
    return any(isinstance(layer, kind) and computes_as(layer, kind) for kind in KINDS)


@dataclass(frozen=True)
class ConvForm:
    """What `build_conv` takes besides a scheme, to replace a conv."""

    in_channels: int
    filters: int
    kernel: Kernel
    stride: Kernel
    padding: Sides
    dilation: Kernel
    channel_groups: int
    padding_mode: str
    bias: bool | Literal["last"]


def form_of(conv: nn.Module) -> ConvForm:
    """The options of the conv that a layer computes."""
    if not isinstance(conv, nn.Conv2d | nn.Conv3d) or not is_torch_layer(conv):
        raise LowRankError(f"a {type(conv).__name__} is not a plain convolution to rewrite.")
    sides = enclosing_padding(conv.padding, conv.kernel_size, conv.dilation)
    return ConvForm(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, sides,
        conv.dilation, conv.groups, conv.padding_mode, "last" if conv.bias is not None else False,
    )  # fmt: skip


_PAD_MODES = ("zeros", "reflect", "replicate", "circular")


class CompositeConv2d(nn.Module):
    """Filter groups of several shapes over one input, concatenated: equal to a conv per group and a cat.

    With channel groups, each has filters of every shape, and its outputs stay together, as in a grouped conv. With
    `shuffle` the outputs of all channel groups alternate, and a next layer with channel groups mixes them.

    Every group sits centred in the kernel that encloses them all, so that all share one output grid at any
    stride. `padding` is that of the enclosing kernel: "same" (the input's size divided by the stride, rounded
    up), "valid", or a number (a pair) as for `nn.Conv2d`.

    Depthwise groups share the input channels out in their order, as InceptionNeXt does: the first takes the first
    channels, and the result has as many channels as the input.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.CompositeConv2d(64, [(3, 1, 32), (1, 3, 32)])
    >>> layer(torch.zeros(1, 64, 8, 8)).shape
    torch.Size([1, 64, 8, 8])
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["kernel_size", "groups", "weight", "options"]
    axes: ClassVar[int] = 2

    def __init__(
        self,
        in_channels: int,
        groups: Composite | Iterable[FilterGroup | Sequence[int]],
        *,
        stride: int | Sequence[int] = 1,
        padding: Padding = "same",
        dilation: int | Sequence[int] = 1,
        channel_groups: int = 1,
        shuffle: bool = False,
        padding_mode: str = "zeros",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.composite = Composite.of(groups)
        self.in_channels, self.out_channels = in_channels, self.composite.filters
        self.stride = per_axis(stride, "stride", self.axes)
        self.dilation = per_axis(dilation, "dilation", self.axes)
        self.channel_groups, self.padding_mode = channel_groups, padding_mode
        self.shuffle = shuffle and channel_groups > 1
        _check_channels(in_channels, self.composite, channel_groups, self.axes)
        check_choice("padding_mode", padding_mode, _PAD_MODES)
        self.padding = enclosing_padding(padding, self.composite.kernel, self.dilation)
        self.group_padding = self._around_groups(self.padding)  # where it is negative, the group must crop
        unpadded = ((0, 0),) * self.axes  # other modes pad the input itself for the enclosing kernel
        sides = self.group_padding if padding_mode == "zeros" else self._around_groups(unpadded)
        self._sides = [list(own) for own in sides]
        self._channel_axis = -1 - self.axes
        self._sizes = [group.filters // channel_groups for group in self.composite.groups]
        self._filtered = [group.taps > 0 for group in self.composite.groups]
        self._depthwise = self.composite.depthwise
        make = {"device": device, "dtype": dtype}
        depth = 1 if self._depthwise else in_channels // channel_groups
        shapes = [(g.filters, depth, *g.kernel) for g in self.composite.groups if g.taps]
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape, **make)) for shape in shapes])
        self.bias = nn.Parameter(torch.empty(self.out_channels, **make)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's initialisation, as if a ReLU follows; `init_` looks at the network around it."""
        for weight in self.weights:
            if not weight.is_meta:
                nn.init.normal_(weight, std=math.sqrt(2 / self.fan_out(weight)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.jit.unused
    def fan_out(self, weight: Tensor) -> float:
        """Outgoing connections of one input value of the group with this weight."""
        if self._depthwise:
            return weight[0].numel()
        return self.composite.fan_out / self.channel_groups

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._by_torch(input)
        else:  # noqa: RET505  TorchScript leaves out what it cannot compile in an `else` alone
            return self._dispatched(input)

    @torch.jit.unused
    def _dispatched(self, x: Tensor) -> Tensor:
        """Run the fused kernels if they support the call, else torch's convolutions, which tracers also see."""
        if isinstance(x, fx.Proxy):  # without a shape to check, and for tools that know torch's operations
            return self._by_torch(x)
        mask_weights(self.weights)  # a plain list in training for int8
        return self.with_weights(x, list(self.weights), self.bias)

    @torch.jit.unused
    def with_weights(self, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
        """Run the layer with other weights, of the same shapes, and another bias."""
        self._check_input(x)
        if self._fusible(x) is not None:
            return self._convs(x, weights, bias)
        if self._depthwise:
            fused = self._bands_of(x, weights, bias)
            return self._convs(x, weights, bias) if fused is None else fused
        run: Any = composite_conv3d if self.axes == 3 else composite_conv2d
        return run(x, weights, bias, stride=self.stride, padding=self.group_padding)

    @torch.jit.unused
    def in_one_pass(self, x: Tensor, **after: Any) -> Tensor | None:
        """A depthwise layer by our kernels, with what follows (see `depthwise_conv2d`); None where they cannot."""
        runs = self._depthwise and self._fusible(x) is None
        return self._bands_of(x, list(self.weights), self.bias, **after) if runs else None

    @torch.jit.unused
    def _bands_of(self, x: Tensor, weights: list[Tensor], bias: Tensor | None, **after: Any) -> Tensor | None:
        given: Any = (self._bands(), self.stride, self.dilation, self._result_size(x))
        return depthwise_conv2d(x, weights, bias, *given, **after)

    def _by_torch(self, x: Tensor) -> Tensor:
        """With torch's operations alone, which TorchScript and fx follow."""
        weights = [weight for weight in self.weights]  # noqa: C416  TorchScript makes no list() of parameters
        return self._convs(x, weights, self.bias)

    def _convs(self, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
        """One convolution per filter group, concatenated."""
        if self.padding_mode != "zeros":
            x = pad_on_sides(x, list(self.padding), self.padding_mode)
        if self._depthwise:
            return self._depthwise_convs(x, weights, bias)
        parts: list[Tensor] = []
        start = 0
        for index, weight in enumerate(weights):
            size, own = self._sizes[index], bias
            if own is not None:
                own = self._by_channel_group(own)[:, start : start + size].flatten()
            options = self._sides[index], self.stride, self.dilation, self.channel_groups
            parts.append(conv_on_sides(x, weight, own, *options))  # type: ignore[arg-type]
            start += size
        return interleaved(parts, self.channel_groups, self._channel_axis, self.shuffle)

    def _depthwise_convs(self, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
        """One depthwise convolution per filter group, on its part of the channels, concatenated."""
        parts: list[Tensor] = []
        start = 0
        used = 0
        for index, own in enumerate(x.split(self._sizes, -3)):
            size, added = self._sizes[index], bias
            if added is not None:
                added = added[start : start + size]
            if self._filtered[index]:
                sides = self._sides[index]
                own = conv_on_sides(own, weights[used], added, sides, self.stride, self.dilation, size)  # type: ignore[arg-type]
                used += 1
            else:
                own = pad_on_sides(own, self._sides[index], "constant")[..., :: self.stride[0], :: self.stride[1]]
                own = own if added is None else own + added.unsqueeze(-1).unsqueeze(-1)
            parts.append(own)
            start += size
        return torch.cat(parts, -3)

    def _by_channel_group(self, values: Tensor) -> Tensor:
        """Values, or rows of them, per output channel, as [channel groups, filters of one group, ...]."""
        if self.shuffle:
            return values.unflatten(0, [-1, self.channel_groups]).transpose(0, 1)
        return values.unflatten(0, [self.channel_groups, -1])

    @property
    def kernel_size(self) -> Kernel:
        """The kernel that encloses every filter group."""
        return self.composite.kernel

    @property
    def groups(self) -> int:
        """Channel groups, by the name that `nn.Conv2d` has for them: those of the equivalent single conv."""
        return self.in_channels if self._depthwise else 1 if self.shuffle else self.channel_groups

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent single conv, zero where no filter has a tap.

        It is computed from `weights`, with gradients, for tools that look at a conv's weight; to change the layer,
        change `weights`.
        """
        weight, groups = dense_weight(list(self.weights), self.composite, self.channel_groups), self.channel_groups
        return interleaved([ungrouped(weight, groups)], groups, 0, True) if self.shuffle else weight

    @property
    def options(self) -> dict[str, Any]:
        """The arguments, besides the filters, that build a layer like this one."""
        names = ("stride", "padding", "dilation", "channel_groups", "padding_mode")
        return {name: getattr(self, name) for name in names} | {"bias": self.bias is not None}

    def by_group(self, values: Tensor) -> list[Tensor]:
        """Values, or rows of them, per output channel, such as a bias, split by filter group."""
        return [part.flatten(0, 1) for part in self._by_channel_group(values).split(self._sizes, dim=1)]

    def explain(self, x: Tensor) -> str:
        """Whether such an input runs through a fused GPU kernel or torch's own convs, and why, in one line."""
        if reason := self._fusible(x):
            return f"torch ({reason})"
        if self._depthwise:
            return explain_depthwise(x, self._bands())
        options = {"stride": self.stride, "padding": self.group_padding, "training": torch.is_grad_enabled()}
        return (explain_volume if self.axes == 3 else explain_call)(x, list(self.weights), **options)

    def dense_view(self) -> nn.Module:
        """The same map as one conv, its kernels padded with zeros to the enclosing shape."""
        weight, options = self.weight, self.options | {"channel_groups": self.groups}
        single = Composite((FilterGroup(*self.composite.kernel, self.out_channels),))
        view = conv_of(self.in_channels, single, **options).to(weight)
        set_weights(view, [weight], self.bias)
        return view

    def with_points(self) -> CompositeConv2d:
        """The same map with depthwise 1x1 filters of ones in place of identities: all channels have a weight."""
        groups = [g if g.taps else FilterGroup(1, 1, g.filters, depthwise=True) for g in self.composite.groups]
        like = self.weights[0] if len(self.weights) else torch.empty(0)
        layer, left = CompositeConv2d(self.in_channels, groups, **self.options).to(like), list(self.weights)
        pairs = zip(layer.weights, self.composite.groups, strict=True)
        set_weights(layer, [left.pop(0) if g.taps else torch.ones_like(own) for own, g in pairs], self.bias)
        return layer.train(self.training)

    def __repr__(self) -> str:
        """One line, as a conv has: torch would list the weights of all groups."""
        return f"{self._get_name()}({self.extra_repr()})"

    def extra_repr(self) -> str:
        groups = " + ".join(f"{g.filters} of {str(g).rpartition(',')[0]}" for g in self.composite.groups)
        text = f"{self.in_channels}, {self.out_channels}, {groups}, stride={self.stride}"
        sides = {side for axis in self.padding for side in axis}
        text += f", padding={self.padding if len(sides) > 1 else sides.pop()}"
        text += f", dilation={self.dilation}" if max(self.dilation) > 1 else ""
        text += f", channel_groups={self.channel_groups}" if self.channel_groups > 1 else ""
        text += ", shuffle=True" if self.shuffle else ""
        text += f", padding_mode={self.padding_mode!r}" if self.padding_mode != "zeros" else ""
        return text + ("" if self.bias is not None else ", bias=False")

    def _around_groups(self, sides: Sides) -> tuple[Sides, ...]:
        """The padding of each group, from that of the enclosing kernel."""
        kernels = [group.kernel or (1,) * self.axes for group in self.composite.groups]
        return tuple(recentred(sides, self.composite.kernel, own, self.dilation) for own in kernels)

    def _bands(self) -> tuple[Band, ...]:
        """The groups as the depthwise kernels take them."""
        pairs = zip(self.composite.groups, self.group_padding, strict=True)
        return tuple(
            Band(g.filters, g.height if g.taps else 0, g.width if g.taps else 0, sides[0][0], sides[1][0])
            for g, sides in pairs
        )

    def _result_size(self, x: Tensor) -> tuple[int, int]:
        axes = zip(x.shape[-2:], self.padding, self.composite.kernel, self.dilation, self.stride, strict=True)
        height, width = ((n + sum(sides) - step * (k - 1) - 1) // by + 1 for n, sides, k, step, by in axes)
        return height, width

    def _fusible(self, x: Tensor) -> str | None:
        """Why the fused kernels cannot run the layer on any device; None if they can."""
        if x.dim() != self.axes + 2:
            return "an image without its batch"
        apart = not self._depthwise and (self.channel_groups > 1 or max(self.dilation) > 1)
        if apart or self.padding_mode != "zeros":
            return "channel groups, dilation or padding other than zeros"
        return None

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in (self.axes + 1, self.axes + 2) or x.shape[self._channel_axis] != self.in_channels:
            expected = f"[N, {self.in_channels}, {'T, ' * (self.axes - 2)}H, W]"
            raise LowRankError(f"a composite layer takes {expected}, not an input of shape {list(x.shape)}.")
        kernel, sizes = self.composite.kernel, x.shape[-self.axes :]
        # A reflection does not repeat the border itself, so it reaches one pixel less than the image.
        room = {"reflect": 1, "circular": 0}.get(self.padding_mode)
        if room is not None and any(max(p) > n - room for p, n in zip(self.padding, sizes, strict=True)):
            raise LowRankError(
                f"{self.padding_mode} padding of {self.padding} is larger than an input of {_by(sizes)}."
            )
        reach = [step * (size - 1) + 1 for size, step in zip(kernel, self.dilation, strict=True)]
        padded = [size + sum(sides) for size, sides in zip(sizes, self.padding, strict=True)]
        if any(space < span for space, span in zip(padded, reach, strict=True)):
            raise LowRankError(
                f"filters that span {_by(reach)} do not fit an input of {_by(sizes)} padded to {_by(padded)}."
            )


class CompositeConv3d(CompositeConv2d):
    """The same over volumes [N, C, T, H, W]: each filter group has a time, a height and a width.

    On a GPU, filters that reach along time alone or within frames alone run by the kernels for images: see
    `kernels.volumes`. Depthwise groups have two sides alone.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.CompositeConv3d(16, [(3, 1, 1, 8), (1, 3, 1, 8), (1, 1, 3, 8)])
    >>> layer(torch.zeros(1, 16, 4, 8, 8)).shape
    torch.Size([1, 24, 4, 8, 8])
    """

    axes = 3


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def mask_weights(holder: nn.Module | list[Tensor]) -> None:
    """Apply the masks of torch.nn.utils.prune, whose hooks run only where somebody calls the module itself."""
    for hook in getattr(holder, "_forward_pre_hooks", {}).values():
        if isinstance(hook, BasePruningMethod):
            hook(holder, ())


def conv_of(in_channels: int, composite: Composite, *, padding: Padding = "same", **options: Any) -> nn.Module:
    """A composite layer; with a single group, a plain `nn.Conv2d` or `nn.Conv3d`, which may be depthwise."""
    if composite.depthwise and len(composite.groups) == 1 and composite.groups[0].taps:
        composite = Composite((FilterGroup(*composite.kernel, composite.filters),))
        options["channel_groups"] = in_channels
    axes = len(composite.kernel)
    sides = enclosing_padding(padding, composite.kernel, per_axis(options.get("dilation", 1), "dilation", axes))
    symmetric = all(before == after >= 0 for before, after in sides)
    if len(composite.groups) > 1 or composite.depthwise or not symmetric or options.get("shuffle"):
        kind = CompositeConv3d if axes == 3 else CompositeConv2d
        return kind(in_channels, composite, padding=sides, **options)
    channel_groups = options.pop("channel_groups", 1)
    options.pop("shuffle", None)
    _check_channels(in_channels, composite, channel_groups, axes)
    options |= {"padding": tuple(before for before, _ in sides), "groups": channel_groups}
    plain: Any = nn.Conv3d if axes == 3 else nn.Conv2d
    return plain(in_channels, composite.filters, composite.kernel, **options)


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    """The weights of a layer: of a composite one for each filter group, of any other the only one."""
    return list(layer.weights) if isinstance(layer, CompositeConv2d) else [layer.weight]  # type: ignore[list-item]


@torch.no_grad()
def set_weights(layer: nn.Module, weights: Iterable[Tensor], bias: Tensor | None = None) -> None:
    """Set the weights of a layer, and its bias; to zero unless it is given."""
    for target, value in zip(weights_of(layer), weights, strict=True):
        target.copy_(value)
    if isinstance(layer.bias, Tensor):
        layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)


def dense_weight(weights: Sequence[Tensor], composite: Composite, channel_groups: int = 1) -> Tensor:
    """The groups' kernels as one tensor, each centred with zeros around it in the enclosing kernel."""
    left, like = list(weights), weights[0] if weights else torch.empty(0)
    # An identity is a filter of a single one.
    whole = [left.pop(0) if group.taps else like.new_ones(group.filters, 1, 1, 1) for group in composite.groups]
    return interleaved([centred(weight, composite.kernel) for weight in whole], channel_groups, 0)


def _check_channels(in_channels: int, composite: Composite, channel_groups: int, axes: int) -> None:
    check_number("in_channels", in_channels, least=1, whole=True)
    if not isinstance(channel_groups, int) or channel_groups < 1 or in_channels % channel_groups:
        raise LowRankError(
            f"{counted(in_channels, 'input channel')} cannot be divided into {channel_groups} channel groups."
        )
    for group in composite.groups:
        if len(group.kernel) != axes and group.taps:
            raise LowRankError(f"a composite layer has {axes}-D filters, not {group}.")
        if group.depthwise != composite.depthwise:
            raise LowRankError(f"the filters of a composite layer are all depthwise or none is, not {composite}.")
        if group.filters % channel_groups:
            raise LowRankError(f"the filter group {group} does not divide into {channel_groups} channel groups.")
    if composite.depthwise and axes != 2:
        raise LowRankError(f"the depthwise filters of a composite layer have two sides, not {composite}.")
    if composite.depthwise and (composite.filters != in_channels or channel_groups > 1):
        has = f"{counted(in_channels, 'input channel')} in {counted(channel_groups, 'channel group')}"
        raise LowRankError(f"depthwise filters are as many as the channels that they see: {composite} has {has}.")
