"""Read an ONNX graph of fixed sizes node by node, and keep its values as tensors of LiteRT in two layouts.

LiteRT's convs and pools take images as [N, H, W, C], ONNX's as [N, C, H, W]. A value may have a tensor in either
layout. The other is made by one transposition, when an operation first asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.deploy.engines.litert_file import LitertGraph, LitertTensor, constant

if TYPE_CHECKING:
    from numpy import ndarray

CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Orders of axes that turn [N, C, H, W] into [N, H, W, C], and back."""
_FUSING = ("Conv", "Gemm", "Add", "Sub", "Mul", "Div", "MaxPool", "AveragePool", "BatchNormalization")
"""Operations that LiteRT computes together with the ReLU or ReLU6 behind them."""


@dataclass(frozen=True)
class OnnxNode:
    """A node of the graph, named by its layer; `activation` is the one behind it that is computed with it."""

    kind: str
    layer: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: dict[str, Any]
    activation: str = "NONE"

    def refused(self, why: str = "") -> LowRankError:
        """The error for a node that cannot be written."""
        where = f" ({self.layer})" if self.layer else ""
        return LowRankError(
            f"the network cannot be written for LiteRT: {self.kind}{where} {why or 'has no translation here'}; "
            "take another target."
        )


@dataclass
class Translation:
    """The values of an ONNX graph as tensors of LiteRT: `first` as they are, `last` with the channels last."""

    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, ndarray]
    graph: LitertGraph = field(default_factory=LitertGraph)
    first: dict[str, LitertTensor] = field(default_factory=dict)
    last: dict[str, LitertTensor] = field(default_factory=dict)

    def plain(self, name: str) -> LitertTensor:
        """A value as ONNX has it."""
        if name not in self.first:
            if name in self.constants:
                self.first[name] = constant(self.constants[name])
            else:
                self.first[name] = self.graph.transposed(self.last[name], CHANNELS_FIRST)
        return self.first[name]

    def image(self, name: str) -> LitertTensor:
        """A value of four dimensions with its channels last."""
        if name not in self.last:
            self.last[name] = self.graph.transposed(self.plain(name), CHANNELS_LAST)
        return self.last[name]

    def stored(self, name: str) -> tuple[LitertTensor, list[int]]:
        """A value in the layout that it has, and the place there of each of ONNX's axes."""
        if name in self.last:
            return self.last[name], [CHANNELS_LAST.index(axis) for axis in range(4)]
        tensor = self.plain(name)
        return tensor, list(range(len(tensor.shape)))

    def put(self, name: str, tensor: LitertTensor, *, like: str) -> None:
        """Keep a result in the layout in which another value is stored."""
        (self.last if like in self.last else self.first)[name] = tensor

    def array(self, node: OnnxNode, place: int) -> Any:
        """An input of a node that must be a constant."""
        name = node.inputs[place] if place < len(node.inputs) else ""
        if name not in self.constants:
            raise node.refused("needs constants where this network computes values")
        return self.constants[name]

    def numbers(self, node: OnnxNode, place: int) -> list[int] | None:
        """Constant integers, such as axes; None where the node has no such input."""
        if place >= len(node.inputs) or not node.inputs[place]:
            return None
        return [int(number) for number in self.array(node, place).reshape(-1)]


def read_onnx(path: Any) -> tuple[Translation, list[OnnxNode], list[str]]:
    """The values, the nodes with their activations, and the names of the outputs of an .onnx file."""
    onnx: Any = require("onnx", extra="onnx", purpose="writing a .tflite file")
    model = onnx.load(str(path))
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
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        found.first[value.name] = LitertTensor(value.name, shapes[value.name], kind)
        found.graph.inputs.append(found.first[value.name])
    outputs = [value.name for value in graph.output]
    return found, with_activations(nodes, outputs, constants), outputs


def with_activations(
    nodes: Sequence[OnnxNode], outputs: Sequence[str], constants: dict[str, ndarray]
) -> list[OnnxNode]:
    """The nodes without those activations that the nodes before them compute as well."""
    uses = Counter(name for node in nodes for name in node.inputs) + Counter(outputs)
    makers: dict[str, int] = {}
    kept: list[OnnxNode] = []
    for node in nodes:
        activation = litert_activation(node, constants)
        place = makers.get(node.inputs[0]) if node.inputs else None
        if activation and place is not None and uses[node.inputs[0]] == 1 and kept[place].activation == "NONE":
            kept[place] = replace(kept[place], outputs=node.outputs, activation=activation)
            continue
        if node.kind in _FUSING:
            makers[node.outputs[0]] = len(kept)
        kept.append(node)
    return kept


def litert_activation(node: OnnxNode, constants: dict[str, ndarray]) -> str | None:
    """The name in LiteRT's schema of an activation that may be part of another operation."""
    if node.kind == "Relu":
        return "RELU"
    if node.kind != "Clip" or any(name not in constants for name in node.inputs[1:] if name):
        return None
    low, high = (float(constants[name]) if name else None for name in (*node.inputs[1:], "", "")[:2])
    return {(0.0, 6.0): "RELU6", (0.0, None): "RELU", (-1.0, 1.0): "RELU_N1_TO_1"}.get((low, high))  # type: ignore[arg-type]
