"""Operations on each value by itself, from ONNX to LiteRT: they keep the layout of what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowrank_cnn.deploy.engines.litert_file import LitertTensor, constant
from lowrank_cnn.deploy.engines.litert_graph import CHANNELS_LAST, OnnxNode, Translation, litert_activation

Translator = Callable[[Translation, OnnxNode], None]


def _unary(kind: str, **options: Any) -> Translator:
    def translated(values: Translation, node: OnnxNode) -> None:
        tensor, _ = values.stored(node.inputs[0])
        values.put(node.outputs[0], values.graph.add(kind, [tensor], tensor.shape, **options), like=node.inputs[0])

    return translated


def _leaky_relu(values: Translation, node: OnnxNode) -> None:
    _unary("LEAKY_RELU", alpha=node.attributes.get("alpha", 0.01))(values, node)


def _gelu(values: Translation, node: OnnxNode) -> None:
    _unary("GELU", approximate=node.attributes.get("approximate", b"none") == b"tanh")(values, node)


def _elu(values: Translation, node: OnnxNode) -> None:
    if node.attributes.get("alpha", 1.0) != 1:
        raise node.refused("has another alpha than 1, which LiteRT lacks")
    _unary("ELU")(values, node)


def _cast(values: Translation, node: OnnxNode) -> None:
    onnx_float32 = 1
    if node.attributes["to"] != onnx_float32:
        raise node.refused("gives another type than float32")
    tensor, _ = values.stored(node.inputs[0])
    result = tensor if tensor.dtype == "float32" else values.graph.add("CAST", [tensor], tensor.shape, "float32")
    values.put(node.outputs[0], result, like=node.inputs[0])


def _same(values: Translation, node: OnnxNode) -> None:
    values.put(node.outputs[0], values.stored(node.inputs[0])[0], like=node.inputs[0])


def _clip(values: Translation, node: OnnxNode) -> None:
    known = litert_activation(node, values.constants)
    if known is not None:
        return _unary(known)(values, node)
    tensor, _ = values.stored(node.inputs[0])
    for place, kind in ((1, "MAXIMUM"), (2, "MINIMUM")):
        if place < len(node.inputs) and node.inputs[place]:
            bound = constant(values.array(node, place).reshape(()))
            tensor = values.graph.add(kind, [tensor, bound], tensor.shape)
    return values.put(node.outputs[0], tensor, like=node.inputs[0])


def _hard_sigmoid(values: Translation, node: OnnxNode) -> None:
    """min(max(a x + b, 0), 1), as a sixth of a ReLU6."""
    from numpy import float32

    graph, (tensor, _) = values.graph, values.stored(node.inputs[0])
    alpha, beta = (float(node.attributes.get(name, usual)) for name, usual in (("alpha", 0.2), ("beta", 0.5)))
    if float32(6 * alpha) != 1:
        tensor = graph.add("MUL", [tensor, constant(float32(6 * alpha))], tensor.shape)
    tensor = graph.add("ADD", [tensor, constant(float32(6 * beta))], tensor.shape, fusedActivationFunction="RELU6")
    tensor = graph.add("MUL", [tensor, constant(float32(1 / 6))], tensor.shape)
    values.put(node.outputs[0], tensor, like=node.inputs[0])


def _prelu(values: Translation, node: OnnxNode) -> None:
    tensor, slope = values.image(node.inputs[0]), values.array(node, 1)
    if slope.size not in (1, tensor.shape[-1]):
        raise node.refused("has a slope of another shape than one for each channel")
    slopes = constant(slope.reshape(1, 1, -1).repeat(tensor.shape[-1] // slope.size, -1))
    values.last[node.outputs[0]] = values.graph.add("PRELU", [tensor, slopes], tensor.shape)


def _binary(kind: str) -> Translator:
    def translated(values: Translation, node: OnnxNode) -> None:
        if len(node.inputs) != 2:
            raise node.refused("has another number of inputs than two")
        result, computed = node.outputs[0], [name for name in node.inputs if name not in values.constants]
        images = any(n in values.last for n in computed) and all(len(values.shapes[n]) == 4 for n in computed)
        parts = [_operand(values, name, image=images) for name in node.inputs]
        shape = values.shapes[result]
        shape = tuple(shape[axis] for axis in CHANNELS_LAST) if images else shape
        options = {} if node.activation == "NONE" else {"fusedActivationFunction": node.activation}
        (values.last if images else values.first)[result] = values.graph.add(kind, parts, shape, **options)

    return translated


def _operand(values: Translation, name: str, *, image: bool) -> LitertTensor:
    if not image:
        return values.plain(name)
    if name not in values.constants:
        return values.image(name)
    array = values.constants[name]
    if array.ndim == 0:
        return constant(array)
    return constant(array.reshape((1,) * (4 - array.ndim) + array.shape).transpose(CHANNELS_LAST))


def _batch_norm(values: Translation, node: OnnxNode) -> None:
    """One that no conv took in: a product and a sum for each channel."""
    weight, bias, mean, variance = (values.array(node, place).astype("float64") for place in range(1, 5))
    scale = weight / (variance + node.attributes.get("epsilon", 1e-5)) ** 0.5
    image = len(values.shapes[node.inputs[0]]) == 4
    tensor = values.image(node.inputs[0]) if image else values.plain(node.inputs[0])
    if not image and len(tensor.shape) != 2:
        raise node.refused("is of another number of dimensions than two or four")
    factors, terms = (constant(part.astype("float32")) for part in (scale, bias - mean * scale))
    tensor = values.graph.add("MUL", [tensor, factors], tensor.shape)
    tensor = values.graph.add("ADD", [tensor, terms], tensor.shape, fusedActivationFunction=node.activation)
    (values.last if image else values.first)[node.outputs[0]] = tensor


ELEMENTWISE: dict[str, Translator] = {
    "Abs": _unary("ABS"),
    "Add": _binary("ADD"),
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Div": _binary("DIV"),
    "Dropout": _same,
    "Elu": _elu,
    "Exp": _unary("EXP"),
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary("HARD_SWISH"),
    "Identity": _same,
    "LeakyRelu": _leaky_relu,
    "Max": _binary("MAXIMUM"),
    "Min": _binary("MINIMUM"),
    "Mul": _binary("MUL"),
    "Neg": _unary("NEG"),
    "PRelu": _prelu,
    "Pow": _binary("POW"),
    "Relu": _unary("RELU"),
    "Sigmoid": _unary("LOGISTIC"),
    "Sqrt": _unary("SQRT"),
    "Sub": _binary("SUB"),
    "Tanh": _unary("TANH"),
}
"""By the name of an ONNX operation: the function that writes it for LiteRT."""
