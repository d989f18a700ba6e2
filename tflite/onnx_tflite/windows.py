"""Convs, pools, crops and padding. LiteRT pads as SAME or VALID only: other padding is an operation of its own.

LiteRT's transposed conv has no groups and no dilation either. It is computed whole and then cropped; groups are
computed one by one, and a dilated kernel has zeros between its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from onnx_tflite.graph import Graph, OnnxNode, Tensor, Translation, constant, integers

_KEEPING_SIGNS = (
    "MAX_POOL_2D",
    "AVERAGE_POOL_2D",
    "RESHAPE",
    "TRANSPOSE",
    "PAD",
    "MIRROR_PAD",
    "GATHER",
    "CONCATENATION",
    "SLICE",
)
"""Operations that give no negative values for non-negative inputs."""
Sides = Sequence[tuple[int, int]]
"""Padding before and after, for each axis."""


@dataclass(frozen=True)
class AxisWindow:
    """Windows along one axis: `count` of them, `step` apart, the first at `-before`."""

    size: int
    count: int
    taps: int
    step: int
    dilation: int
    before: int
    after: int

    @property
    def needed(self) -> int:
        """How far the last window reads beyond the end."""
        return (self.count - 1) * self.step + self.dilation * (self.taps - 1) + 1 - self.size - self.before

    @property
    def is_same(self) -> bool:
        """Whether LiteRT's SAME padding equals that of these windows."""
        total = max(0, self.needed + self.before)
        return self.count == -(-self.size // self.step) and self.before == total // 2

    def divisors(self, *, padding: bool) -> list[int]:
        """The divisor of an average at each window; `padding` says whether zeros count."""
        starts = [place * self.step - self.before for place in range(self.count)]
        if padding:
            return [min(start + self.taps, self.size + self.after) - start for start in starts]
        return [min(start + self.taps, self.size) - max(start, 0) for start in starts]


def conv(values: Translation, node: OnnxNode) -> None:
    """A conv with its channel groups."""
    weight = values.array(node, 1)
    bias = values.array(node, 2) if len(node.inputs) > 2 else numpy.zeros(len(weight), weight.dtype)
    windows = _windows(values, node, weight.shape[2:])
    tensor = values.image(node.inputs[0])
    channels = tensor.shape[3]
    tensor, padding = _padded(values.graph, tensor, windows)
    options: dict[str, Any] = {"padding": padding, "fusedActivationFunction": node.activation, **_strides(windows)}
    options |= {"dilationHFactor": windows[0].dilation, "dilationWFactor": windows[1].dilation}
    if 1 < channels == node.attributes.get("group", 1):
        kind, order = "DEPTHWISE_CONV_2D", (1, 2, 3, 0)
        options["depthMultiplier"] = len(weight) // channels
    else:
        kind, order = "CONV_2D", (0, 2, 3, 1)
    parts = [tensor, constant(weight.transpose(order)), constant(bias)]
    shape = (tensor.shape[0], *(window.count for window in windows), len(weight))
    values.last[node.outputs[0]] = values.graph.add(kind, parts, shape, **options)


def max_pool(values: Translation, node: OnnxNode) -> None:
    """A max-pool: after a ReLU it is padded with zeros, else with the lowest value."""
    if any(step != 1 for step in node.attributes.get("dilations", ())) or len(node.outputs) > 1:
        raise node.refused("has dilations or gives places")
    windows = _windows(values, node, node.attributes["kernel_shape"])
    tensor = values.image(node.inputs[0])
    low = 0.0 if _has_no_negatives(values.graph, tensor) else float("-inf")
    tensor, padding = _padded(values.graph, tensor, windows, low)
    values.last[node.outputs[0]] = _pool(values.graph, "MAX_POOL_2D", tensor, windows, padding, node.activation)


def average_pool(values: Translation, node: OnnxNode) -> None:
    """An average pool; if LiteRT would divide by another number, a constant corrects it."""
    kernel = node.attributes["kernel_shape"]
    if len(kernel) == 3:
        return _average_over_channels(values, node)
    windows = _windows(values, node, kernel)
    values.last[node.outputs[0]] = _averages(values.graph, node, values.image(node.inputs[0]), windows)
    return None


def _averages(graph: Graph, node: OnnxNode, tensor: Tensor, windows: Sequence[AxisWindow]) -> Tensor:
    zeros_count = bool(node.attributes.get("count_include_pad", 0))
    whole = all(window.before == 0 and window.needed <= 0 for window in windows)
    if whole or (not zeros_count and all(window.is_same for window in windows)):  # LiteRT counts no padding
        padding = "VALID" if whole else "SAME"
        return _pool(graph, "AVERAGE_POOL_2D", tensor, windows, padding, node.activation)
    tensor, _ = _padded(graph, tensor, windows, same=False)
    rows, columns = (numpy.array(window.divisors(padding=zeros_count), "float64") for window in windows)
    factors = windows[0].taps * windows[1].taps / numpy.outer(rows, columns)
    if (factors == 1).all():
        return _pool(graph, "AVERAGE_POOL_2D", tensor, windows, "VALID", node.activation)
    tensor = _pool(graph, "AVERAGE_POOL_2D", tensor, windows, "VALID", "NONE")
    correction = constant(factors.astype("float32")[None, :, :, None])
    return graph.add("MUL", [tensor, correction], tensor.shape, fusedActivationFunction=node.activation)


def _average_over_channels(values: Translation, node: OnnxNode) -> None:
    """The pool of torch's local response norm: over the channels of [N, 1, C, H, W], which are rows here."""
    name, result, attributes = node.inputs[0], node.outputs[0], node.attributes
    batch, one, channels, *size = values.shapes[name]
    taps, *flat = attributes["kernel_shape"]
    pads, strides = attributes.get("pads", [0] * 6), attributes.get("strides", [1] * 3)
    if one != 1 or flat != [1, 1] or any(pads[1:3] + pads[4:]) or list(strides) != [1] * 3:
        raise node.refused("is a pool of 3 dimensions")
    width, count = size[0] * size[1], values.shapes[result][2]
    windows = [
        AxisWindow(channels, count, taps, 1, 1, pads[0], pads[3]),
        AxisWindow(width, width, 1, 1, 1, 0, 0),
    ]
    rows = values.graph.reshaped(values.plain(name), (batch, channels, width, 1))
    made = _averages(values.graph, node, rows, windows)
    values.first[result] = values.graph.reshaped(made, values.shapes[result])


def _check_rank(node: OnnxNode, kernel: Sequence[int]) -> None:
    if len(kernel) != 2:
        raise node.refused(f"is {len(kernel)}-dimensional, and only 2 dimensions can be written")


def _windows(values: Translation, node: OnnxNode, kernel: Sequence[int]) -> list[AxisWindow]:
    """The windows along height and width."""
    _check_rank(node, kernel)
    attributes, found = node.attributes, []
    sizes, counts = (values.shapes[name][2:] for name in (node.inputs[0], node.outputs[0]))
    pads = attributes.get("pads", [0] * 4)
    way = attributes.get("auto_pad", b"NOTSET")
    for axis, (size, count, taps) in enumerate(zip(sizes, counts, kernel, strict=True)):
        step, dilation = (attributes.get(name, [1, 1])[axis] for name in ("strides", "dilations"))
        window = AxisWindow(size, count, taps, step, dilation, pads[axis], pads[axis + 2])
        if way.startswith(b"SAME"):
            total = max(0, AxisWindow(size, count, taps, step, dilation, 0, 0).needed)
            half = total // 2 if way == b"SAME_UPPER" else total - total // 2
            window = AxisWindow(size, count, taps, step, dilation, half, total - half)
        found.append(window)
    return found


def _padded(
    graph: Graph,
    tensor: Tensor,
    windows: Sequence[AxisWindow],
    value: float = 0.0,
    *,
    same: bool = True,
) -> tuple[Tensor, str]:
    """The input, padded or cropped unless LiteRT's SAME or VALID does it, and the padding mode to use."""
    if same and all(window.is_same for window in windows):
        return tensor, "SAME"
    cut = [(max(0, -window.before), window.size, 1) for window in windows]
    tensor = crop(graph, tensor, [(0, tensor.shape[0], 1), *cut, (0, tensor.shape[3], 1)])
    sides = [(max(0, window.before), max(0, window.needed)) for window in windows]
    return fill(graph, tensor, [(0, 0), *sides, (0, 0)], value), "VALID"


def fill(graph: Graph, tensor: Tensor, sides: Sides, value: float = 0.0) -> Tensor:
    """A tensor with a constant before and after its values."""
    if not any(map(any, sides)):
        return tensor
    shape = [size + low + high for size, (low, high) in zip(tensor.shape, sides, strict=True)]
    amounts = constant(numpy.array(sides, numpy.int32))
    if value == 0:
        return graph.add("PAD", [tensor, amounts], shape)
    return graph.add("PADV2", [tensor, amounts, constant(numpy.array([value], tensor.dtype))], shape)


def continued(graph: Graph, tensor: Tensor, sides: Sides, mode: str) -> Tensor:
    """A tensor padded with its own values: mirrored (reflect), the last ones (edge), the other end's (wrap)."""
    if mode == "reflect" and any(map(any, sides)):
        shape = [size + low + high for size, (low, high) in zip(tensor.shape, sides, strict=True)]
        return graph.add("MIRROR_PAD", [tensor, constant(numpy.array(sides, numpy.int32))], shape, mode="REFLECT")
    for axis, (low, high) in enumerate(sides):
        if low or high:
            places = numpy.pad(numpy.arange(tensor.shape[axis]), (low, high), mode=mode)  # type: ignore[call-overload]
            shape = [*tensor.shape[:axis], len(places), *tensor.shape[axis + 1 :]]
            tensor = graph.add("GATHER", [tensor, integers(places)], shape, axis=axis)
    return tensor


def crop(graph: Graph, tensor: Tensor, bounds: Sequence[tuple[int, int, int]]) -> Tensor:
    """A part of a tensor: for each axis a start, an end and a step."""
    if all(
        (start, end, step) == (0, size, 1) for (start, end, step), size in zip(bounds, tensor.shape, strict=True)
    ):
        return tensor
    starts, ends, steps = zip(*bounds, strict=True)
    shape = [len(range(*bound)) for bound in bounds]
    if set(steps) == {1}:
        return graph.add("SLICE", [tensor, integers(starts), integers(shape)], shape)
    return graph.add("STRIDED_SLICE", [tensor, *map(integers, (starts, ends, steps))], shape)


def _pool(
    graph: Graph,
    kind: str,
    tensor: Tensor,
    windows: Sequence[AxisWindow],
    padding: str,
    activation: str,
) -> Tensor:
    shape = (tensor.shape[0], *(window.count for window in windows), tensor.shape[3])
    options: dict[str, Any] = {
        "filterHeight": windows[0].taps,
        "filterWidth": windows[1].taps,
        **_strides(windows),
    }
    return graph.add(kind, [tensor], shape, padding=padding, fusedActivationFunction=activation, **options)


def _strides(windows: Sequence[AxisWindow]) -> dict[str, int]:
    return {"strideH": windows[0].step, "strideW": windows[1].step}


def _has_no_negatives(graph: Graph, tensor: Tensor) -> bool:
    maker = next((each for each in reversed(graph.operations) if each.output is tensor), None)
    if maker is None:
        return False
    activations = (maker.kind, maker.options.get("fusedActivationFunction"))
    if any(each in ("RELU", "RELU6", "LOGISTIC") for each in activations):
        return True
    parts = maker.inputs if maker.kind == "CONCATENATION" else maker.inputs[:1]
    return maker.kind in _KEEPING_SIGNS and all(_has_no_negatives(graph, part) for part in parts)


def transposed_conv(values: Translation, node: OnnxNode) -> None:
    """A transposed conv of images."""
    weight, attributes, graph = values.array(node, 1), node.attributes, values.graph
    _check_rank(node, weight.shape[2:])
    weight = _spread(weight, attributes.get("dilations", [1, 1]))
    steps, groups = attributes.get("strides", [1, 1]), attributes.get("group", 1)
    batch, channels, *size = values.shapes[node.outputs[0]]
    bias = values.array(node, 2) if len(node.inputs) > 2 else numpy.zeros(channels, weight.dtype)
    bounds = [(start, start + n, 1) for start, n in zip(attributes.get("pads", [0] * 4), size, strict=False)]
    tensor = _reaching(graph, values.image(node.inputs[0]), bounds, steps, weight.shape[2:])
    parts, start = [], 0
    for kernel, terms in zip(numpy.split(weight, groups), numpy.split(bias, groups), strict=True):
        whole = [(0, length, 1) for length in tensor.shape[:3]]
        part = crop(graph, tensor, [*whole, (start, start + len(kernel), 1)])
        made = _whole(graph, part, kernel, terms, steps)
        parts.append(crop(graph, made, [(0, batch, 1), *bounds, (0, len(terms), 1)]))
        start += len(kernel)
    if groups > 1:
        shape = (batch, *size, channels)
        parts = [graph.add("CONCATENATION", parts, shape, axis=3, fusedActivationFunction="NONE")]
    values.last[node.outputs[0]] = parts[0]


def _whole(graph: Graph, tensor: Tensor, kernel: Any, bias: Any, steps: Sequence[int]) -> Tensor:
    """The full transposed conv of a tensor with a kernel of [in, out, height, width]."""
    sides = zip(tensor.shape[1:3], steps, kernel.shape[2:], strict=True)
    shape = (tensor.shape[0], *((n - 1) * step + taps for n, step, taps in sides), len(bias))
    parts = [integers(shape), constant(kernel.transpose(1, 2, 3, 0)), tensor, constant(bias)]
    options = {"padding": "VALID", "strideH": steps[0], "strideW": steps[1]}
    return graph.add("TRANSPOSE_CONV", parts, shape, tensor.dtype, **options)


def _spread(weight: Any, dilations: Sequence[int]) -> Any:
    """A kernel with zeros between its taps, equivalent to a dilated one."""
    sizes = [step * (taps - 1) + 1 for step, taps in zip(dilations, weight.shape[2:], strict=True)]
    wide = numpy.zeros((*weight.shape[:2], *sizes), weight.dtype)
    wide[:, :, :: dilations[0], :: dilations[1]] = weight
    return wide


def _reaching(
    graph: Graph,
    tensor: Tensor,
    bounds: Sequence[tuple[int, int, int]],
    steps: Sequence[int],
    kernel: Sequence[int],
) -> Tensor:
    """The input with zeros appended if the result ends beyond the last tap, as with output padding."""
    axes = zip(bounds, steps, kernel, tensor.shape[1:3], strict=True)
    zeros = [(0, max(0, -(-(end - taps) // step) + 1 - size)) for (_, end, _), step, taps, size in axes]
    return fill(graph, tensor, [(0, 0), *zeros, (0, 0)])
