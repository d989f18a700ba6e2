"""What a .tflite file holds: tensors and operations, and the bytes of both by LiteRT's own schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.errors import LowRankError, require

if TYPE_CHECKING:
    from numpy import ndarray

NOTES = "lowrank_cnn"
"""The name under which a file keeps our metadata."""
_VERSION, _IDENTIFIER, _ALIGNMENT = 3, b"TFL3", 16
"""Of LiteRT's format; the schema asks for constants that are aligned to so many bytes."""
_HALF = {"reduced_precision_support": b"fp16accfp16"}
"""The entry that lets XNNPACK compute in half precision, on processors that can."""
_VERSIONS = {"DEQUANTIZE": 3, "RESIZE_BILINEAR": 3, "RESIZE_NEAREST_NEIGHBOR": 3, "TRANSPOSE_CONV": 3}
"""Versions of operations, where the first lacks what is written here."""
_INT8_VERSIONS = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "QUANTIZE": 1, "RESHAPE": 1}
"""Versions of operations that give int8; all others have it from their second on."""
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
"""Classes of the schema that hold an operation's options, where they are not called as the operation is."""


@dataclass(frozen=True)
class Levels:
    """Which values integers stand for, (integer - zero) * scale; several scales are those of an axis."""

    scale: ndarray
    zero: ndarray
    axis: int = 0


@dataclass(eq=False)
class LitertTensor:
    """A tensor of the file. A constant has data; a tensor of integers that stand for values has levels."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    data: ndarray | None = None
    levels: Levels | None = None


@dataclass(eq=False)
class Operation:
    """An operation by its name in the schema, and the layer of the network that it belongs to."""

    kind: str
    inputs: list[LitertTensor]
    output: LitertTensor
    options: dict[str, Any]
    layer: str = ""

    @property
    def version(self) -> int:
        """The first version of this operation that does what is asked."""
        if self.output.dtype == "int8":
            return _INT8_VERSIONS.get(self.kind, 2)
        return _VERSIONS.get(self.kind, 1)


@dataclass
class LitertGraph:
    """Operations in the order in which they run. `layer` is the layer of operations that are added now."""

    inputs: list[LitertTensor] = field(default_factory=list)
    outputs: list[LitertTensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    layer: str = ""

    def add(
        self, kind: str, inputs: Sequence[LitertTensor], shape: Sequence[int], dtype: str = "", **options: Any
    ) -> LitertTensor:
        """Append an operation; the tensor that it gives, in the type of its first input unless told."""
        name = f"{self.layer or inputs[0].name}/{kind.lower()}"
        result = LitertTensor(name, tuple(shape), dtype or inputs[0].dtype)
        self.operations.append(Operation(kind, list(inputs), result, options, self.layer))
        return result

    def reshaped(self, tensor: LitertTensor, shape: Sequence[int]) -> LitertTensor:
        """A tensor in another shape."""
        if tensor.data is not None:
            return constant(tensor.data.reshape(shape))
        return self.add("RESHAPE", [tensor, integers(shape)], shape, newShape=list(shape))

    def transposed(self, tensor: LitertTensor, order: Sequence[int]) -> LitertTensor:
        """A tensor with its axes in another order; by another shape where no value changes its place."""
        if tensor.data is not None:
            return constant(tensor.data.transpose(order))
        shape = [tensor.shape[axis] for axis in order]
        long = [axis for axis in order if tensor.shape[axis] > 1]
        if long == sorted(long):
            return self.reshaped(tensor, shape)
        return self.add("TRANSPOSE", [tensor, integers(order)], shape)


def constant(data: Any) -> LitertTensor:
    """A tensor with these values."""
    import numpy

    array = numpy.ascontiguousarray(data).reshape(numpy.shape(data))
    return LitertTensor("constant", array.shape, str(array.dtype), array)


def integers(values: Sequence[int]) -> LitertTensor:
    """Axes, sizes or places, as operations take them."""
    import numpy

    return constant(numpy.array(values, numpy.int32))


def packed(graph: LitertGraph, notes: bytes, *, half: bool = False) -> bytes:
    """The bytes of a .tflite file; with `half`, LiteRT computes in half precision where the processor can."""
    schema = require("ai_edge_litert.schema_py_generated", extra="engines", purpose="writing a .tflite file")
    flatbuffers: Any = require("flatbuffers", extra="engines", purpose="writing a .tflite file")
    model = _Packing(schema).model(graph, {NOTES: notes} | (_HALF if half else {}))
    builder = flatbuffers.Builder(1024)
    try:
        builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
    except flatbuffers.builder.BuilderSizeError as error:
        raise LowRankError("the network cannot be written for LiteRT: a .tflite file has 2 GB at most.") from error
    return bytes(builder.Output())


def read_notes(content: bytes) -> bytes:
    """The metadata that `packed` put into a file; empty where there is none."""
    schema: Any = require("ai_edge_litert.schema_py_generated", extra="engines", purpose="reading a .tflite file")
    model = schema.Model.GetRootAs(content)
    entries = [model.Metadata(place) for place in range(model.MetadataLength())]
    found = [entry.Buffer() for entry in entries if entry.Name() == NOTES.encode()]
    return model.Buffers(found[0]).DataAsNumpy().tobytes() if found else b""


class _Packing:
    """From our graph to the objects of the schema."""

    def __init__(self, schema: Any) -> None:
        class AlignedBuffer(schema.BufferT):
            """The Python classes of the schema do not align constants themselves."""

            def Pack(self, builder: Any) -> Any:  # noqa: N802, a name of the schema's
                builder.Prep(_ALIGNMENT, len(self.data))
                return super().Pack(builder)

        self.schema, self.buffer_kind = schema, AlignedBuffer
        self.buffers = [schema.BufferT()]  # the first is that of every tensor without data
        self.codes: dict[tuple[str, int], int] = {}
        self.places: dict[LitertTensor, int] = {}
        self.tensors: list[Any] = []

    def model(self, graph: LitertGraph, metadata: Mapping[str, bytes]) -> Any:
        import numpy

        made, schema = _made, self.schema
        inputs, outputs = ([self._place(tensor) for tensor in part] for part in (graph.inputs, graph.outputs))
        operators = [self._operator(operation) for operation in graph.operations]
        main = made(schema.SubGraphT, name="main", inputs=inputs, outputs=outputs, operators=operators)
        main.tensors = self.tensors
        entries = [
            made(schema.MetadataT, name=name, buffer=self._buffer(numpy.frombuffer(text, numpy.uint8)))
            for name, text in metadata.items()
        ]
        return made(
            schema.ModelT,
            version=_VERSION,
            description="lowrank-cnn",
            subgraphs=[main],
            metadata=entries,
            signatureDefs=[self._signature(graph)],
            operatorCodes=[self._code(kind, version) for kind, version in self.codes],
            buffers=self.buffers,
        )

    def _signature(self, graph: LitertGraph) -> Any:
        """The names by which `get_signature_runner` takes inputs and gives outputs."""

        def named(tensors: list[LitertTensor]) -> list[Any]:
            return [_made(self.schema.TensorMapT, name=t.name, tensorIndex=self._place(t)) for t in tensors]

        inputs, outputs = named(graph.inputs), named(graph.outputs)
        return _made(self.schema.SignatureDefT, signatureKey="serving_default", inputs=inputs, outputs=outputs)

    def _code(self, kind: str, version: int) -> Any:
        number = getattr(self.schema.BuiltinOperator, kind)
        old = min(number, self.schema.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES)
        return _made(self.schema.OperatorCodeT, builtinCode=number, deprecatedBuiltinCode=old, version=version)

    def _operator(self, operation: Operation) -> Any:
        schema, code = self.schema, (operation.kind, operation.version)
        enumerations = {
            "padding": schema.Padding,
            "fusedActivationFunction": schema.ActivationFunctionType,
            "mode": schema.MirrorPadMode,
        }
        options = {
            name: getattr(enumerations[name], value) if name in enumerations else value
            for name, value in operation.options.items()
        }
        made = _made(schema.OperatorT, opcodeIndex=self.codes.setdefault(code, len(self.codes)))
        made.inputs = [self._place(tensor) for tensor in operation.inputs]
        made.outputs = [self._place(operation.output)]
        usual = operation.kind.replace("_", " ").title().replace(" ", "") + "Options"
        name = _OPTIONS.get(operation.kind, usual)
        if hasattr(schema.BuiltinOptions, name):
            made.builtinOptionsType = getattr(schema.BuiltinOptions, name)
            made.builtinOptions = _made(getattr(schema, f"{name}T"), **options)
        return made

    def _place(self, tensor: LitertTensor) -> int:
        """The number of a tensor in the file."""
        if tensor not in self.places:
            kind = getattr(self.schema.TensorType, tensor.dtype.upper())
            buffer = 0 if tensor.data is None else self._buffer(tensor.data)
            made = _made(self.schema.TensorT, name=tensor.name, shape=list(tensor.shape), type=kind, buffer=buffer)
            if (levels := tensor.levels) is not None:
                made.quantization = _made(
                    self.schema.QuantizationParametersT,
                    scale=levels.scale,
                    zeroPoint=levels.zero,
                    quantizedDimension=levels.axis,
                )
            self.places[tensor] = len(self.tensors)
            self.tensors.append(made)
        return self.places[tensor]

    def _buffer(self, data: ndarray) -> int:
        self.buffers.append(_made(self.buffer_kind, data=data.reshape(-1).view("uint8")))
        return len(self.buffers) - 1


def _made(kind: Any, **values: Any) -> Any:
    """An object of the schema; an attribute that its class lacks is a mistake of ours."""
    made = kind()
    for name, value in values.items():
        if not hasattr(made, name):
            raise AttributeError(f"{kind.__name__} has no {name}")
        setattr(made, name, value)
    return made
