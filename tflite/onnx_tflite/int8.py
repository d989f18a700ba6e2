"""int8 in .tflite files: weights per output channel, activations per tensor, biases in int32.

The float graph runs in LiteRT on the calibration images, and the least and largest value of each tensor set its
range. Average pools stay in float: LiteRT would round means to the levels of their inputs, which are too coarse. A
global mean has its own levels, and is in int8 if a layer reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy
from ai_edge_litert.interpreter import Interpreter
from numpy import ndarray

from onnx_tflite.graph import Graph, Levels, Operation, Tensor, packed

_CHANNEL_AXES = {"CONV_2D": 0, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 0}
"""Layers, and the axis of their weights that has the output channels."""
_OWN_RANGE = ("ADD", "SUB", "MUL", "RELU", "RELU6", "LEAKY_RELU", "LOGISTIC")
"""Operations between computed tensors whose result has a range of its own."""
_SAME_RANGE = (
    "MAX_POOL_2D",
    "CONCATENATION",
    "RESHAPE",
    "TRANSPOSE",
    "PAD",
    "MIRROR_PAD",
    "SLICE",
    "STRIDED_SLICE",
)
"""Operations that only move values: all of their tensors share one range, as LiteRT requires."""
_READERS = (*_CHANNEL_AXES, "MEAN", "AVERAGE_POOL_2D")
"""Operations whose input may have a given range."""
_MOST_BIAS, _LEAST_STEP = 2.0**30, 2.0**-24
"""Bounds of a channel's scale: its bias fits into int32; weights below this share of an output level are zero."""
_SIGMOID = (0.0, 255 / 256)
"""The one range of LiteRT's sigmoid in int8."""
Ranges = dict[Tensor, tuple[float, float]]


def quantize(
    graph: Graph,
    calibration: Iterable[Sequence[ndarray]],
    layer_ranges: Mapping[str, tuple[float, float]],
    in_float: Sequence[str],
) -> Graph:
    """The same graph in int8, except for unsupported operations and the layers that stay in float."""
    chosen = _chosen(graph, in_float)
    levels = _levels(graph, chosen, _measured(graph, calibration), _given(graph, layer_ranges))
    made = _Int8Graph(levels)
    for operation in graph.operations:
        (made.add_int8 if operation in chosen else made.add_float)(operation)
    made.graph.inputs = graph.inputs
    made.graph.outputs = [made.in_float(tensor) for tensor in graph.outputs]
    return made.graph


def _chosen(graph: Graph, in_float: Sequence[str]) -> set[Operation]:
    """The operations that run in int8: layers and arithmetic, and those between them that join."""
    allowed = (each for each in graph.operations if not any(_is_in(each, layer) for layer in in_float))
    able = [each for each in allowed if _is_able(each)]
    found = {each for each in able if each.kind in (*_CHANNEL_AXES, *_OWN_RANGE)}
    makers = {each.output: each for each in graph.operations}
    readers: dict[Tensor, list[Operation]] = {}
    for each in graph.operations:
        for tensor in each.inputs:
            readers.setdefault(tensor, []).append(each)

    def joins(operation: Operation) -> bool:
        before = [makers.get(tensor) for tensor in _activations(operation)]
        if any(maker is not None and maker.kind == "LOGISTIC" for maker in before):  # whose levels are fixed
            return False
        behind = readers.get(operation.output, [])
        if behind and all(each in found for each in behind):
            return True
        return operation.kind != "MEAN" and all(maker in found for maker in before)

    rest = [each for each in able if each not in found]
    while joined := [each for each in rest if joins(each)]:
        found.update(joined)
        rest = [each for each in rest if each not in found]
    return found


def _is_able(operation: Operation) -> bool:
    """Whether LiteRT supports an operation on these tensors in int8."""
    computed = list(_activations(operation))
    if any(tensor.dtype != "float32" for tensor in (*computed, operation.output)) or not computed:
        return False
    if operation.kind in _CHANNEL_AXES:
        return len(computed) == 1
    if operation.kind in _OWN_RANGE:
        # A square needs twice the bits: in int8 the variance of a weak channel would be zero.
        return len({*computed}) == len(operation.inputs)
    return operation.kind in (*_SAME_RANGE, "MEAN")


def _activations(operation: Operation) -> Iterator[Tensor]:
    return (tensor for tensor in operation.inputs if tensor.data is None)


def _is_in(operation: Operation, layer: str) -> bool:
    return operation.layer.startswith((f"{layer}/", f"{layer}."))


def _measured(graph: Graph, calibration: Iterable[Sequence[ndarray]]) -> Ranges:
    """The least and largest value of each tensor on the calibration images."""
    tensors = [*graph.inputs, *(operation.output for operation in graph.operations)]
    tensors = [tensor for tensor in tensors if tensor.dtype == "float32"]
    interpreter = Interpreter(model_content=packed(replace(graph, outputs=tensors)))
    interpreter.allocate_tensors()
    inputs, outputs = (
        [each["index"] for each in details]
        for details in (interpreter.get_input_details(), interpreter.get_output_details())
    )
    found: Ranges = {}
    for batch in calibration:
        for images in zip(*batch, strict=True):
            for place, image in zip(inputs, images, strict=True):
                interpreter.set_tensor(place, image[None])
            interpreter.invoke()
            for tensor, place in zip(tensors, outputs, strict=True):
                array = interpreter.get_tensor(place)
                _widen(found, tensor, (float(array.min()), float(array.max())))
    return found


def _given(graph: Graph, layer_ranges: Mapping[str, tuple[float, float]]) -> Ranges:
    """The given ranges of layers' inputs, by the tensors that have them."""
    found: Ranges = {}
    for operation in graph.operations:
        ends = next((ends for layer, ends in layer_ranges.items() if _is_in(operation, layer)), None)
        if ends is not None and operation.kind in _READERS:
            _widen(found, operation.inputs[0], ends)
    return found


def _widen(ranges: Ranges, tensor: Tensor, ends: tuple[float, float]) -> None:
    """Add a range; a tensor that several layers read gets the union of their ranges."""
    low, high = ranges.get(tensor, ends)
    ranges[tensor] = min(low, ends[0]), max(high, ends[1])


def _levels(graph: Graph, chosen: set[Operation], measured: Ranges, given: Ranges) -> dict[Tensor, Levels]:
    """The levels of each tensor. Tensors that share levels get the union of their ranges, given ones first."""
    groups = {tensor: {tensor} for tensor in measured}
    for operation in (each for each in graph.operations if each in chosen and each.kind in _SAME_RANGE):
        joined = set().union(*(groups[tensor] for tensor in (*_activations(operation), operation.output)))
        groups |= dict.fromkeys(joined, joined)
    fixed = {operation.output: _SIGMOID for operation in chosen if operation.kind == "LOGISTIC"}
    found = {}
    for tensor, group in groups.items():
        known = next(ranges for ranges in (fixed, given, measured) if any(each in ranges for each in group))
        found[tensor] = _asymmetric([known[each] for each in group if each in known])
    return found


def _asymmetric(ranges: Iterable[tuple[float, float]]) -> Levels:
    lows, highs = zip(*ranges, strict=True)
    low, high = min(0.0, *lows), max(0.0, *highs)
    scale = numpy.float32((high - low) / 255 or 1.0)
    zero = int(numpy.clip(round(-128 - low / float(scale)), -128, 127))
    return Levels(numpy.array([scale], "float32"), numpy.array([zero], "int64"))


class _Int8Graph:
    """A graph under construction: each tensor in float, in int8, or in both if operations need both."""

    def __init__(self, levels: dict[Tensor, Levels]) -> None:
        self.levels = levels
        self.graph = Graph()
        self.small: dict[Tensor, Tensor] = {}
        self.made: set[Tensor] = set()
        """Tensors that were dequantised to float."""

    def add_float(self, operation: Operation) -> None:
        inputs = [self.in_float(tensor) for tensor in operation.inputs]
        self.graph.operations.append(replace(operation, inputs=inputs))

    def add_int8(self, operation: Operation) -> None:
        inputs = [tensor if tensor.data is not None else self.in_int8(tensor) for tensor in operation.inputs]
        result = self._as_int8(operation.output)
        if operation.kind in _CHANNEL_AXES:
            inputs[1:] = _int8_weights(operation, inputs[0], result)
        self.graph.operations.append(replace(operation, inputs=inputs, output=result))
        self.small[operation.output] = result

    def in_int8(self, tensor: Tensor) -> Tensor:
        if tensor not in self.small:
            self.small[tensor] = self._as_int8(tensor)
            self.graph.operations.append(Operation("QUANTIZE", [tensor], self.small[tensor], {}))
            self.made.add(tensor)
        return self.small[tensor]

    def in_float(self, tensor: Tensor) -> Tensor:
        if tensor in self.small and tensor not in self.made:
            self.graph.operations.append(Operation("DEQUANTIZE", [self.small[tensor]], tensor, {}))
            self.made.add(tensor)
        return tensor

    def _as_int8(self, tensor: Tensor) -> Tensor:
        return Tensor(f"{tensor.name}/int8", tensor.shape, "int8", levels=self.levels[tensor])


def _int8_weights(operation: Operation, given: Tensor, result: Tensor) -> list[Tensor]:
    """Weights and biases of a layer in int8 and int32, scaled by output channel."""
    axis = _CHANNEL_AXES[operation.kind]
    weight, bias = (tensor.data.astype("float64") for tensor in operation.inputs[1:3])  # type: ignore[union-attr]
    step, out_step = (float(tensor.levels.scale[0]) for tensor in (given, result))  # type: ignore[union-attr]
    largest = numpy.abs(weight).max(axis=tuple(place for place in range(weight.ndim) if place != axis))
    scale = numpy.maximum(largest / 127, numpy.abs(bias) / (step * _MOST_BIAS))
    scale = numpy.maximum(scale, _LEAST_STEP * out_step / step).astype("float32").astype("float64")
    shape = [-1 if place == axis else 1 for place in range(weight.ndim)]
    small = numpy.clip(numpy.round(weight / scale.reshape(shape)), -127, 127).astype("int8")
    steps = numpy.round(bias / (step * scale)).astype("int32")
    return [_with_levels(small, scale, axis), _with_levels(steps, step * scale, 0)]


def _with_levels(data: ndarray, scale: ndarray, axis: int) -> Tensor:
    levels = Levels(scale.astype("float32"), (0 * scale).astype("int64"), axis)
    return Tensor("constant", data.shape, str(data.dtype), data, levels)
