"""Depthwise convs of a network, and modules that split channels among them, as layers of the depthwise kernels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lowrank_cnn.core.modules import has_hooks, is_plain
from lowrank_cnn.kernels import depthwise_conv2d
from lowrank_cnn.kernels.depthwise.plan import Band, Pair
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.spec import FilterGroup


class _Part(NamedTuple):
    """Consecutive channels, and the depthwise conv that they pass, if any."""

    channels: int
    conv: nn.Conv2d | None


class FusedBands(nn.Module):
    """Depthwise convs on parts of the channels, concatenated, in one pass over the pixels.

    It shares the weights of the convs, and has no modules of its own, so that a capture takes it as one layer. In
    the place of a single conv it has that conv's attributes, which a forward may read.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        super().__init__()
        convs = [part.conv for part in parts]
        first = next(conv for conv in convs if conv is not None)
        self.stride: Pair = first.stride  # type: ignore[assignment]
        self.dilation: Pair = first.dilation  # type: ignore[assignment]
        shapes = [(0, 0, 0, 0) if conv is None else (*conv.kernel_size, *conv.padding) for conv in convs]
        self.bands = tuple(Band(part.channels, *own) for part, own in zip(parts, shapes, strict=True))  # type: ignore[arg-type]
        for place, conv in enumerate(convs):
            for kind in ("weight", "bias"):
                self.register_parameter(self._name(kind, place), None if conv is None else conv._parameters[kind])
        if len(parts) == 1:
            for name in ("in_channels", "out_channels", "kernel_size", "padding", "groups", "padding_mode"):
                setattr(self, name, getattr(first, name))

    def forward(self, input: Tensor) -> Tensor:
        x = input  # named as that of a conv, which some call by keyword
        if (fused := self.in_one_pass(x)) is not None:
            return fused
        weights, biases = self._of("weight"), self._of("bias")
        sizes = [band.channels for band in self.bands]
        parts = x.split(sizes, -3) if len(sizes) > 1 else [x]
        found = []
        for part, band, weight, bias in zip(parts, self.bands, weights, biases, strict=True):
            options = (self.stride, (band.top, band.left), self.dilation, band.channels)
            found.append(part if weight is None else F.conv2d(part, weight, bias, *options))
        return torch.cat(found, -3) if len(found) > 1 else found[0]

    def in_one_pass(self, x: Tensor, **after: Any) -> Tensor | None:
        """The result of our kernels, with what follows (see `depthwise_conv2d`); None where they cannot."""
        if x.dim() != 4:
            return None
        biases, added = self._of("bias"), None
        if (like := next((bias for bias in biases if bias is not None), None)) is not None:
            # Passed and bare channels have zeros.
            pairs = zip(biases, self.bands, strict=True)
            added = torch.cat([like.new_zeros(band.channels) if bias is None else bias for bias, band in pairs])
        filters = [weight for weight in self._of("weight") if weight is not None]
        given = (self.bands, self.stride, self.dilation, self._size(x))
        return depthwise_conv2d(x, filters, added, *given, **after)

    def _of(self, kind: str) -> list[Tensor | None]:
        return [getattr(self, self._name(kind, place)) for place in range(len(self.bands))]

    def _name(self, kind: str, place: int) -> str:
        return kind if len(self.bands) == 1 else f"{kind}_{place}"

    def _size(self, x: Tensor) -> Pair:
        band = next(band for band in self.bands if band.taps)
        axes = zip(x.shape[2:], band[1:3], band[3:5], self.stride, self.dilation, strict=True)
        height, width = ((n + 2 * pad - step * (k - 1) - 1) // by + 1 for n, k, pad, by, step in axes)
        return height, width

    def extra_repr(self) -> str:
        shapes = [f"{b.height}x{b.width}" if b.taps else "identity" for b in self.bands]
        return " + ".join(f"{shape},{band.channels}" for shape, band in zip(shapes, self.bands, strict=True))


def fused_bands(module: nn.Module) -> FusedBands | None:
    """A depthwise conv, or a module that splits channels among such convs, as one layer; None for others."""
    parts = _parts_of(module)
    return None if parts is None else FusedBands(parts).train(module.training)


def split_as_composite(module: nn.Module) -> CompositeConv2d | None:
    """A module that splits channels as a composite with copies of its weights, which can take the norm after it.

    None for others, and if a kernel is even or changes the size of its map.
    """
    parts = None if isinstance(module, nn.Conv2d) else _parts_of(module)
    if parts is None:
        return None
    convs = [part.conv for part in parts if part.conv is not None]
    sides = [(k, p, d) for c in convs for k, p, d in zip(c.kernel_size, c.padding, c.dilation, strict=True)]
    if any(k % 2 == 0 or 2 * p != d * (k - 1) for k, p, d in sides):  # type: ignore[operator]
        return None
    shapes = [() if part.conv is None else part.conv.kernel_size for part in parts]
    groups = [FilterGroup(*own, part.channels, depthwise=True) for own, part in zip(shapes, parts, strict=True)]
    first, bias = convs[0], any(conv.bias is not None for conv in convs)
    options: dict[str, Any] = {"stride": first.stride, "dilation": first.dilation, "bias": bias}
    layer = CompositeConv2d(sum(part.channels for part in parts), groups, **options).to(first.weight)
    with torch.no_grad():
        for weight, conv in zip(layer.weights, convs, strict=True):
            weight.copy_(conv.weight)
        if layer.bias is not None:
            for own, part in zip(layer.by_group(layer.bias), parts, strict=True):
                own.zero_() if part.conv is None or part.conv.bias is None else own.copy_(part.conv.bias)
    return layer.train(first.training)


def _parts_of(module: nn.Module) -> list[_Part] | None:
    """The parts that a module filters, if that is all it does and one launch can run them; else None.

    One launch runs plain depthwise convs of one stride, whose results have one size.
    """
    if isinstance(module, nn.Conv2d):
        parts = [_Part(module.in_channels, module)]
    else:
        split = module._modules and all(isinstance(part, nn.Conv2d) for part in module.children())
        parts = _split(module) if split else []
    convs = [part.conv for part in parts if part.conv is not None]
    for conv in convs:
        weight = conv._parameters.get("weight")
        owned = weight is not None and (conv.bias is None or isinstance(conv.bias, nn.Parameter))
        plain = is_plain(conv, nn.Conv2d) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        if not (owned and plain and conv.groups == conv.in_channels == conv.out_channels > 1):
            return None
    if any(part.conv is not None and part.conv.in_channels != part.channels for part in parts):
        return None
    lost = {
        tuple(2 * p - d * (k - 1) for k, p, d in zip(c.kernel_size, c.padding, c.dilation, strict=True))  # type: ignore[arg-type, operator]
        for c in convs
    }
    one = len(lost) == len({(conv.stride, conv.dilation) for conv in convs}) == 1
    kept = len(convs) == len(parts) or (lost == {(0, 0)} and convs[0].stride == (1, 1))
    return parts if one and kept else None


def _split(module: nn.Module) -> list[_Part]:
    """The parts of a forward that splits its input along the channels, filters some, and joins them; else none."""
    if has_hooks(module) or "forward" in vars(module):
        return []
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # a forward may fail on symbolic values in any way
        return []
    nodes = list(graph.nodes)
    match [(node.target, [*node.args, *node.kwargs.values()]) for node in nodes]:
        case [_, (torch.split, [_, [*sizes], 1]), *between, (torch.cat, [[*joined], 1]), (_, [result])]:
            if result is not nodes[-2] or len(sizes) != len(joined):
                return []
        case _:
            return []
    parts: list[_Part] = []
    for place, (size, given) in enumerate(zip(sizes, joined, strict=True)):
        conv: Any = module.get_submodule(given.target) if given.op == "call_module" else None
        source: Any = given if conv is None else next(iter(given.args), None)  # a keyword is no argument
        if getattr(source, "target", None) is not operator.getitem or source.args != (nodes[1], place):
            return []
        parts.append(_Part(size, conv))
    used = sum(1 if part.conv is None else 2 for part in parts)
    return parts if len(between) == used else []
