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
        weights, biases = self._of("weight"), self._of("bias")
        if x.dim() == 4:
            # Passed and bare channels have zeros, if any others have a bias.
            added = None
            if any(bias is not None for bias in biases):
                sizes = [band.channels for band in self.bands]
                like = next(bias for bias in biases if bias is not None)
                added = torch.cat(
                    [like.new_zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)]
                )
            filters = [weight for weight in weights if weight is not None]
            given = (self.bands, self.stride, self.dilation, self._size(x))
            if (fused := depthwise_conv2d(x, filters, added, *given)) is not None:
                return fused
        parts = x.split([band.channels for band in self.bands], -3) if len(self.bands) > 1 else [x]
        found = [self._by_torch(*four) for four in zip(parts, self.bands, weights, biases, strict=True)]
        return torch.cat(found, -3) if len(found) > 1 else found[0]

    def _of(self, kind: str) -> list[Tensor | None]:
        return [getattr(self, self._name(kind, place)) for place in range(len(self.bands))]

    def _name(self, kind: str, place: int) -> str:
        return kind if len(self.bands) == 1 else f"{kind}_{place}"

    def _by_torch(self, x: Tensor, band: Band, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return F.conv2d(x, weight, bias, self.stride, (band.top, band.left), self.dilation, band.channels)

    def _size(self, x: Tensor) -> Pair:
        band = next(band for band in self.bands if band.taps)
        axes = zip(x.shape[2:], band[1:3], band[3:5], self.stride, self.dilation, strict=True)
        height, width = ((n + 2 * pad - step * (k - 1) - 1) // by + 1 for n, k, pad, by, step in axes)
        return height, width

    def extra_repr(self) -> str:
        shapes = [f"{b.height}x{b.width}" if b.taps else "identity" for b in self.bands]
        return " + ".join(f"{shape},{band.channels}" for shape, band in zip(shapes, self.bands, strict=True))


def with_bands(module: nn.Module) -> nn.Module:
    """Replace depthwise convs, and modules that split channels among them, possibly in place."""
    if (parts := _parts_of(module)) is not None:
        return FusedBands(parts).train(module.training)
    for name, part in module._modules.items():
        module._modules[name] = part and with_bands(part)
    return module


def splits_as_composites(module: nn.Module) -> nn.Module:
    """Replace modules that split channels by composites with copies of their weights, possibly in place.

    A batch norm after such a module can then be folded into it.
    """
    for name, part in module._modules.items():
        parts = None if part is None or isinstance(part, nn.Conv2d) else _parts_of(part)
        composite = None if parts is None else _composite(parts)
        if part is not None:
            module._modules[name] = composite or splits_as_composites(part)
    return module


def _composite(parts: Sequence[_Part]) -> CompositeConv2d | None:
    """The composite of these parts; None if a kernel is even or changes the size of its map."""
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
    """The parts that a module filters, if that is all it does; None if it does anything else."""
    if isinstance(module, nn.Conv2d):
        parts = [_Part(module.in_channels, module)]
    elif module._modules and all(isinstance(part, nn.Conv2d) for part in module.children()):
        parts = _split(module)
    else:
        return None
    return parts if parts and _alike(parts) else None


def _split(module: nn.Module) -> list[_Part] | None:
    """The parts of a forward that splits its input along the channels, filters parts and concatenates them."""
    if has_hooks(module) or "forward" in vars(module):
        return None
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # a forward may fail on symbolic values in any way
        return None
    steps = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    if len(inputs) != 1 or not steps or steps[0].target is not torch.split or result is not steps[-1]:
        return None
    whole, sizes, *axis = (*steps[0].args, *steps[0].kwargs.values())
    joined = (*result.args, *result.kwargs.values())
    if whole is not inputs[0] or axis != [1] or result.target is not torch.cat or joined[1:] != (1,):
        return None
    # A split into equal parts, say, names one size.
    if not all(isinstance(several, tuple | list) for several in (sizes, joined[0])):
        return None
    parts: list[_Part] = []
    for place, (size, given) in enumerate(zip(sizes, joined[0], strict=False)):
        conv = module.get_submodule(str(given.target)) if given.op == "call_module" else None
        source: Any = next(iter(given.args), given) if conv is not None else given
        if (
            not isinstance(source, fx.Node)
            or source.target is not operator.getitem
            or source.args != (steps[0], place)
        ):
            return None
        parts.append(_Part(size, conv))  # type: ignore[arg-type]
    used = 2 + 2 * len(parts) - sum(part.conv is None for part in parts)
    return parts if len(parts) == len(sizes) == len(joined[0]) and len(steps) == used else None


def _alike(parts: Sequence[_Part]) -> bool:
    """Whether one launch can run these: plain depthwise convs of one stride, whose results have one size."""
    convs = [part.conv for part in parts if part.conv is not None]
    for conv in convs:
        parameters = (conv._parameters.get("weight"), conv.bias)
        plain = is_plain(conv, nn.Conv2d) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        owned = all(p is None or isinstance(p, nn.Parameter) for p in parameters) and parameters[0] is not None
        if not plain or not owned or not conv.groups == conv.in_channels == conv.out_channels > 1:
            return False
    if len({(conv.stride, conv.dilation) for conv in convs}) != 1:
        return False
    if any(part.conv is not None and part.conv.in_channels != part.channels for part in parts):
        return False
    lost = {
        tuple(2 * p - d * (k - 1) for k, p, d in zip(c.kernel_size, c.padding, c.dilation, strict=True))  # type: ignore[arg-type, operator]
        for c in convs
    }
    passed = len(convs) < len(parts)
    return len(lost) == 1 and (not passed or (lost == {(0, 0)} and convs[0].stride == (1, 1)))
