"""The graph of a .tflite file, the ONNX graph it is made from, and its bytes in LiteRT's schema.

LiteRT's convs and pools take images as [N, H, W, C], ONNX's as [N, C, H, W]. A value may have a tensor in either
layout; the other is made by one transposition when an operation first needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import flatbuffers
import numpy
import onnx
from ai_edge_litert import schema_py_generated as schema
from numpy import ndarray

CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Orders of axes that turn [N, C, H, W] into [N, H, W, C], and back."""
_FUSING = ("Conv", "Gemm", "Add", "Sub", "Mul", "Div", "MaxPool", "AveragePool", "BatchNormalization")
"""Operations that LiteRT computes together with the ReLU or ReLU6 after them."""
_VERSIONS = {"DEQUANTIZE": 3, "RESIZE_BILINEAR": 3, "RESIZE_NEAREST_NEIGHBOR": 3, "TRANSPOSE_CONV": 3}
"""Versions of float operations; all others need the first only."""
_INT8_VERSIONS = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "QUANTIZE": 1, "RESHAPE": 1}
"""Versions of operations that give int8; all others need the second."""
_OPTIONS = {
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "MEAN": "ReducerOptions",
    "REDUCE_MAX": "ReducerOptions",
    "MAXIMUM": "MaximumMinimumOptions",
    "MINIMUM": "MaximumMinimumOptions",
    "BATCH_MATMUL": "BatchMatMulOptions",
    "PADV2": "PadV2Options",
}
"""Schema classes of options whose name does not follow from the operation's."""
_ENUMERATIONS = {
    "padding": schema.Padding,
    "fusedActivationFunction": schema.ActivationFunctionType,
    "mode": schema.MirrorPadMode,
}
"""Options that are given by name."""


class ConversionError(ValueError):
    """The model has something that cannot be written as a .tflite file; the message names it."""


@dataclass(frozen=True)
class Levels:
    """The values that integers represent: (integer - zero) * scale; several scales run along an axis."""

    scale: ndarray
    zero: ndarray
    axis: int = 0


@dataclass(eq=False)
class Tensor:
    """A tensor of the file. A constant has data; a quantised tensor has levels."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    data: ndarray | None = None
    levels: Levels | None = None


@dataclass(eq=False)
class Operation:
    """An operation by its name in the schema, and the layer of the network that it belongs to."""

    kind: str
    inputs: list[Tensor]
    output: Tensor
    options: dict[str, Any]
    layer: str = ""

    @property
    def version(self) -> int:
        """The first version of this operation that supports these types."""
        if self.output.dtype == "int8":
            return _INT8_VERSIONS.get(self.kind, 2)
        return _VERSIONS.get(self.kind, 1)


@dataclass
class Graph:
    """Operations in the order in which they run. `layer` is the layer of operations that are added now."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    layer: str = ""

    def add(
        self, kind: str, inputs: Sequence[Tensor], shape: Sequence[int], dtype: str = "", **options: Any
    ) -> Tensor:
        """Append an operation and return its result, by default in the type of its first input."""
        name = f"{self.layer or inputs[0].name}/{kind.lower()}"
        result = Tensor(name, tuple(shape), dtype or inputs[0].dtype)
        self.operations.append(Operation(kind, list(inputs), result, options, self.layer))
        return result

    def reshaped(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor in another shape."""
        if tensor.data is not None:
            return constant(tensor.data.reshape(shape))
        return self.add("RESHAPE", [tensor, integers(shape)], shape, newShape=list(shape))

    def transposed(self, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """A tensor with its axes in another order; a reshape if no value moves."""
        if tensor.data is not None:
            return constant(tensor.data.transpose(order))
        shape = [tensor.shape[axis] for axis in order]
        long = [axis for axis in order if tensor.shape[axis] > 1]
        if long == sorted(long):
            return self.reshaped(tensor, shape)
        return self.add("TRANSPOSE", [tensor, integers(order)], shape)


def constant(data: Any) -> Tensor:
    """A tensor with these values."""
    array = numpy.ascontiguousarray(data).reshape(numpy.shape(data))
    return Tensor("constant", array.shape, str(array.dtype), array)


def integers(values: Sequence[int]) -> Tensor:
    """Axes, sizes or indices as a constant tensor."""
    return constant(numpy.array(values, numpy.int32))


@dataclass(frozen=True)
class OnnxNode:
    """A node of the graph, named by its layer; `activation` is the fused one after it."""

    kind: str
    layer: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: dict[str, Any]
    activation: str = "NONE"

    def refused(self, why: str = "has no translation here") -> ConversionError:
        """The error for a node that cannot be written."""
        where = f" ({self.layer})" if self.layer else ""
        return ConversionError(f"{self.kind}{where} {why}")


@dataclass
class Translation:
    """The values of an ONNX graph as LiteRT tensors: `first` in ONNX's layout, `last` channels-last."""

    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, ndarray]
    graph: Graph = field(default_factory=Graph)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    def plain(self, name: str) -> Tensor:
        """A value in ONNX's layout."""
        if name not in self.first:
            if name in self.constants:
                self.first[name] = constant(self.constants[name])
            else:
                self.first[name] = self.graph.transposed(self.last[name], CHANNELS_FIRST)
        return self.first[name]

    def image(self, name: str) -> Tensor:
        """A value of four dimensions with its channels last."""
        if name not in self.last:
            self.last[name] = self.graph.transposed(self.plain(name), CHANNELS_LAST)
        return self.last[name]

    def stored(self, name: str) -> tuple[Tensor, list[int]]:
        """A value in its present layout, and the position there of each of ONNX's axes."""
        if name in self.last:
            return self.last[name], [CHANNELS_LAST.index(axis) for axis in range(4)]
        tensor = self.plain(name)
        return tensor, list(range(len(tensor.shape)))

    def put(self, name: str, tensor: Tensor, *, like: str) -> None:
        """Store a result in the layout of another value."""
        (self.last if like in self.last else self.first)[name] = tensor

    def array(self, node: OnnxNode, place: int) -> Any:
        """An input of a node that must be a constant."""
        name = node.inputs[place] if place < len(node.inputs) else ""
        if name not in self.constants:
            raise node.refused("needs constants where this network computes values")
        return self.constants[name]

    def numbers(self, node: OnnxNode, place: int) -> list[int] | None:
        """Constant integers, such as axes; None if the node has no such input."""
        if place >= len(node.inputs) or not node.inputs[place]:
            return None
        return [int(number) for number in self.array(node, place).reshape(-1)]


def read_onnx(model: onnx.ModelProto) -> tuple[Translation, list[OnnxNode], list[str]]:
    """The values, the nodes with their activations, and the names of the outputs of an ONNX model."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            constants[node.output[0]] = onnx.numpy_helper.to_array(attributes["value"])
        else:
            nodes.append(OnnxNode(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes))
    known = (*graph.input, *graph.output, *graph.value_info)
    shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in known}
    found = Translation(shapes, constants)
    for value in graph.input:
        if 0 in shapes[value.name]:
            raise ConversionError(f"the input {value.name} has an axis of any length")
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        found.first[value.name] = Tensor(value.name, shapes[value.name], kind)
        found.graph.inputs.append(found.first[value.name])
    outputs = [value.name for value in graph.output]
    return found, with_activations(nodes, outputs, constants), outputs


def with_activations(
    nodes: Sequence[OnnxNode], outputs: Sequence[str], constants: dict[str, ndarray]
) -> list[OnnxNode]:
    """The nodes without the activations that are fused into the nodes before them."""
    uses = Counter(name for node in nodes for name in node.inputs) + Counter(outputs)
    makers: dict[str, int] = {}
    kept: list[OnnxNode] = []
    for node in nodes:
        activation = fused_activation(node, constants)
        place = makers.get(node.inputs[0]) if node.inputs else None
        if activation and place is not None and uses[node.inputs[0]] == 1 and kept[place].activation == "NONE":
            kept[place] = replace(kept[place], outputs=node.outputs, activation=activation)
            continue
        if node.kind in _FUSING:
            makers[node.outputs[0]] = len(kept)
        kept.append(node)
    return kept


def fused_activation(node: OnnxNode, constants: dict[str, ndarray]) -> str | None:
    """The name in LiteRT's schema of an activation that may be part of another operation."""
    if node.kind == "Relu":
        return "RELU"
    if node.kind != "Clip" or any(name not in constants for name in node.inputs[1:] if name):
        return None
    low, high = (float(constants[name]) if name else None for name in (*node.inputs[1:], "", "")[:2])
    return {(0.0, 6.0): "RELU6", (0.0, None): "RELU", (-1.0, 1.0): "RELU_N1_TO_1"}.get((low, high))  # type: ignore[arg-type]


def packed(graph: Graph, metadata: Mapping[str, bytes] | None = None, description: str = "") -> bytes:
    """The bytes of a .tflite file."""
    builder = flatbuffers.Builder(1024)
    model = _Packing().model(graph, metadata or {}, description)
    try:
        builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    except flatbuffers.builder.BuilderSizeError as error:
        raise ConversionError("a .tflite file has 2 GB at most") from error
    return bytes(builder.Output())


class _AlignedBuffer(schema.BufferT):
    """A constant at a multiple of 16 bytes, which the schema requires but its Python classes do not ensure."""

    def Pack(self, builder: Any) -> Any:  # noqa: N802, a name of the schema's
        builder.Prep(16, len(self.data))  # type: ignore[arg-type]
        return super().Pack(builder)


class _Packing:
    """Turns a graph into objects of the schema, numbering tensors, buffers and kinds of operations."""

    def __init__(self) -> None:
        self.buffers = [schema.BufferT()]  # the first is that of every tensor without data
        self.codes: dict[tuple[str, int], int] = {}
        self.numbers: dict[Tensor, int] = {}
        self.tensors: list[Any] = []

    def model(self, graph: Graph, metadata: Mapping[str, bytes], description: str) -> Any:
        inputs, outputs = ([self._number(tensor) for tensor in part] for part in (graph.inputs, graph.outputs))
        operators = [self._operator(operation) for operation in graph.operations]
        main = _made(
            schema.SubGraphT,
            name="main",
            inputs=inputs,
            outputs=outputs,
            operators=operators,
            tensors=self.tensors,
        )
        named_inputs, named_outputs = (
            [_made(schema.TensorMapT, name=tensor.name, tensorIndex=self.numbers[tensor]) for tensor in part]
            for part in (graph.inputs, graph.outputs)
        )
        signature = _made(
            schema.SignatureDefT, signatureKey="serving_default", inputs=named_inputs, outputs=named_outputs
        )
        entries = [
            _made(schema.MetadataT, name=name, buffer=self._buffer(numpy.frombuffer(text, numpy.uint8)))
            for name, text in metadata.items()
        ]
        return _made(
            schema.ModelT,
            version=3,
            description=description,
            subgraphs=[main],
            metadata=entries,
            signatureDefs=[signature],
            operatorCodes=[_code(kind, version) for kind, version in self.codes],
            buffers=self.buffers,
        )

    def _operator(self, operation: Operation) -> Any:
        code = operation.kind, operation.version
        made = _made(
            schema.OperatorT,
            opcodeIndex=self.codes.setdefault(code, len(self.codes)),
            inputs=[self._number(tensor) for tensor in operation.inputs],
            outputs=[self._number(operation.output)],
        )
        usual = operation.kind.replace("_", " ").title().replace(" ", "") + "Options"
        name = _OPTIONS.get(operation.kind, usual)
        if hasattr(schema.BuiltinOptions, name):
            options = {
                key: getattr(_ENUMERATIONS[key], value) if key in _ENUMERATIONS else value
                for key, value in operation.options.items()
            }
            made.builtinOptionsType = getattr(schema.BuiltinOptions, name)
            made.builtinOptions = _made(getattr(schema, f"{name}T"), **options)
        return made

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor in the file."""
        if tensor not in self.numbers:
            kind = getattr(schema.TensorType, tensor.dtype.upper())
            buffer = 0 if tensor.data is None else self._buffer(tensor.data)
            made = _made(schema.TensorT, name=tensor.name, shape=list(tensor.shape), type=kind, buffer=buffer)
            if (levels := tensor.levels) is not None:
                made.quantization = _made(
                    schema.QuantizationParametersT,
                    scale=levels.scale,
                    zeroPoint=levels.zero,
                    quantizedDimension=levels.axis,
                )
            self.numbers[tensor] = len(self.tensors)
            self.tensors.append(made)
        return self.numbers[tensor]

    def _buffer(self, data: ndarray) -> int:
        self.buffers.append(_made(_AlignedBuffer, data=data.reshape(-1).view("uint8")))
        return len(self.buffers) - 1


def _code(kind: str, version: int) -> Any:
    number = getattr(schema.BuiltinOperator, kind)
    old = min(number, schema.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES)
    return _made(schema.OperatorCodeT, builtinCode=number, deprecatedBuiltinCode=old, version=version)


def _made(kind: Any, **values: Any) -> Any:
    """An object of the schema; an attribute that its class lacks is a bug here."""
    made = kind()
    for name, value in values.items():
        if not hasattr(made, name):
            raise AttributeError(f"{kind.__name__} has no {name}")
        setattr(made, name, value)
    return made
