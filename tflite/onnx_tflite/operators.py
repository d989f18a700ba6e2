"""From an ONNX model to a graph of LiteRT: one function for each operation, in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy import float32
from onnx import ModelProto

from onnx_tflite.graph import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    Graph,
    OnnxNode,
    Tensor,
    Translation,
    constant,
    fused_activation,
    integers,
    read_onnx,
)
from onnx_tflite.windows import average_pool, continued, conv, crop, fill, max_pool, transposed_conv

Translator = Callable[[Translation, OnnxNode], None]


def translate(model: ModelProto) -> Graph:
    """The graph of an ONNX model of fixed sizes as LiteRT's operations."""
    values, nodes, outputs = read_onnx(model)
    graph = values.graph
    for node in nodes:
        graph.layer = node.layer
        if node.kind not in OPERATORS:
            raise node.refused()
        OPERATORS[node.kind](values, node)
    graph.layer = ""
    for name in outputs:
        tensor = values.plain(name)
        if tensor.data is not None or tensor in (*graph.inputs, *graph.outputs):
            sizes = integers(tensor.shape)  # a copy: each output is a tensor of its own
            tensor = graph.add("RESHAPE", [tensor, sizes], tensor.shape, newShape=list(tensor.shape))
        tensor.name = name
        graph.outputs.append(tensor)
    return graph


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
    known = fused_activation(node, values.constants)
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


def _operand(values: Translation, name: str, *, image: bool) -> Tensor:
    if not image:
        return values.plain(name)
    if name not in values.constants:
        return values.image(name)
    array = values.constants[name]
    if array.ndim == 0:
        return constant(array)
    return constant(array.reshape((1,) * (4 - array.ndim) + array.shape).transpose(CHANNELS_LAST))


def _batch_norm(values: Translation, node: OnnxNode) -> None:
    """A batch norm that is not folded into a conv: a product and a sum for each channel."""
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


def _reshape(values: Translation, node: OnnxNode) -> None:
    name, result = node.inputs[0], node.outputs[0]
    tensor, places = values.stored(name)
    long = [place for place in places if tensor.shape[place] > 1]
    if long != sorted(long):  # the values have another order than in ONNX
        tensor = values.plain(name)
    values.first[result] = values.graph.reshaped(tensor, values.shapes[result])


def _transpose(values: Translation, node: OnnxNode) -> None:
    name, result = node.inputs[0], node.outputs[0]
    rank = len(values.shapes[name])
    order = tuple(node.attributes.get("perm", range(rank)[::-1]))
    if order == CHANNELS_LAST:
        values.first[result] = values.image(name)
    elif order == CHANNELS_FIRST:
        values.last[result] = values.plain(name)
    else:
        values.first[result] = values.graph.transposed(values.plain(name), order)


def _concat(values: Translation, node: OnnxNode) -> None:
    result = node.outputs[0]
    axis, rank = node.attributes["axis"] % len(values.shapes[result]), len(values.shapes[result])
    image = rank == 4 and any(name in values.last for name in node.inputs)
    parts = [values.image(name) if image else values.plain(name) for name in node.inputs]
    shape = [values.shapes[result][a] for a in CHANNELS_LAST] if image else values.shapes[result]
    axis = CHANNELS_LAST.index(axis) if image else axis
    tensor = values.graph.add("CONCATENATION", parts, shape, axis=axis, fusedActivationFunction="NONE")
    (values.last if image else values.first)[result] = tensor


def _slice(values: Translation, node: OnnxNode) -> None:
    tensor, places = values.stored(node.inputs[0])
    starts, ends = values.numbers(node, 1) or [], values.numbers(node, 2) or []
    axes = values.numbers(node, 3) or list(range(len(starts)))
    steps = values.numbers(node, 4) or [1] * len(starts)
    if min(steps) < 1:
        raise node.refused("goes backwards")
    bounds = [(0, size, 1) for size in tensor.shape]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = places[axis]
        bounds[place] = slice(start, end, step).indices(tensor.shape[place])
    values.put(node.outputs[0], crop(values.graph, tensor, bounds), like=node.inputs[0])


def _split(values: Translation, node: OnnxNode) -> None:
    tensor, places = values.stored(node.inputs[0])
    place, start = places[node.attributes.get("axis", 0)], 0
    for name in node.outputs:
        bounds = [(0, size, 1) for size in tensor.shape]
        size = values.shapes[name][node.attributes.get("axis", 0)]
        bounds[place] = (start, start + size, 1)
        start += size
        values.put(name, crop(values.graph, tensor, bounds), like=node.inputs[0])


def _pad(values: Translation, node: OnnxNode) -> None:
    tensor, places = values.stored(node.inputs[0])
    mode = node.attributes.get("mode", b"constant").decode()
    given = len(node.inputs) > 2 and bool(node.inputs[2])
    value = float(values.array(node, 2).reshape(())) if given else 0.0
    amounts, rank = values.numbers(node, 1) or [], len(places)
    axes = values.numbers(node, 3) or list(range(rank))
    sides = [(0, 0)] * rank
    for axis, before, after in zip(axes, amounts, amounts[len(axes) :], strict=False):
        sides[places[axis]] = (before, after)
    bounds = [
        (max(0, -low), size + min(0, high), 1) for size, (low, high) in zip(tensor.shape, sides, strict=True)
    ]
    tensor = crop(values.graph, tensor, bounds)
    sides = [(max(0, low), max(0, high)) for low, high in sides]
    if mode == "constant":
        tensor = fill(values.graph, tensor, sides, value)
    else:
        tensor = continued(values.graph, tensor, sides, mode)
    values.put(node.outputs[0], tensor, like=node.inputs[0])


def _instance_norm(values: Translation, node: OnnxNode) -> None:
    """Normalise each channel of each image by its own mean and variance; a group norm's channels are groups."""
    name, graph = node.inputs[0], values.graph
    image = len(values.shapes[name]) == 4
    tensor = values.image(name) if image else values.plain(name)
    axes = integers([1, 2] if image else range(2, len(tensor.shape)))
    once = [size if place in (0, 3 if image else 1) else 1 for place, size in enumerate(tensor.shape)]
    mean = graph.add("MEAN", [tensor, axes], once, keepDims=True)
    centred = graph.add("SUB", [tensor, mean], tensor.shape)
    variance = graph.add("MEAN", [graph.add("MUL", [centred, centred], tensor.shape), axes], once, keepDims=True)
    epsilon = constant(float32(node.attributes.get("epsilon", 1e-5)))
    scale = graph.add("RSQRT", [graph.add("ADD", [variance, epsilon], once)], once)
    channels = [1, *once[1:]]
    weight, bias = (values.array(node, place).reshape(channels) for place in (1, 2))
    scale = scale if (weight == 1).all() else graph.add("MUL", [scale, constant(weight)], once)
    made = graph.add("MUL", [centred, scale], tensor.shape)
    made = made if (bias == 0).all() else graph.add("ADD", [made, constant(bias)], tensor.shape)
    (values.last if image else values.first)[node.outputs[0]] = made


def _linear(values: Translation, node: OnnxNode) -> None:
    """A Gemm, or a product with a constant matrix."""
    attributes, weight = node.attributes, values.array(node, 1)
    odd = attributes.get("transA", 0) or any(attributes.get(name, 1.0) != 1 for name in ("alpha", "beta"))
    if odd or weight.ndim != 2:
        raise node.refused("has factors or transpositions of its own")
    weight = weight if attributes.get("transB", 0) else weight.T
    bias = values.array(node, 2) if len(node.inputs) > 2 else weight[:, 0] * 0
    tensor, shape = values.plain(node.inputs[0]), values.shapes[node.outputs[0]]
    parts = [tensor, constant(weight), constant(bias.reshape(-1))]
    options = {"keepNumDims": len(shape) > 2, "fusedActivationFunction": node.activation}
    values.first[node.outputs[0]] = values.graph.add("FULLY_CONNECTED", parts, shape, **options)


def _matmul(values: Translation, node: OnnxNode) -> None:
    if node.inputs[1] in values.constants and values.constants[node.inputs[1]].ndim == 2:
        return _linear(values, node)
    parts = [values.plain(name) for name in node.inputs]
    values.first[node.outputs[0]] = values.graph.add("BATCH_MATMUL", parts, values.shapes[node.outputs[0]])
    return None


def _softmax(values: Translation, node: OnnxNode) -> None:
    name, result = node.inputs[0], node.outputs[0]
    rank = len(values.shapes[name])
    axis = node.attributes.get("axis", -1) % rank
    if rank == 4 and axis == 1:
        tensor = values.image(name)
        values.last[result] = values.graph.add("SOFTMAX", [tensor], tensor.shape, beta=1.0)
    elif axis == rank - 1:
        tensor = values.plain(name)
        values.first[result] = values.graph.add("SOFTMAX", [tensor], tensor.shape, beta=1.0)
    else:
        raise node.refused("is over another axis than the channels or the last")


def _resize(values: Translation, node: OnnxNode) -> None:
    attributes, tensor = node.attributes, values.image(node.inputs[0])
    way = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
    mode, rounding = (attributes.get(n, b"").decode() for n in ("mode", "nearest_mode"))
    modes = {("nearest", "asymmetric"): "RESIZE_NEAREST_NEIGHBOR"}
    modes |= {("linear", one): "RESIZE_BILINEAR" for one in ("half_pixel", "pytorch_half_pixel", "align_corners")}
    kind = modes.get((mode, way))
    if kind is None or attributes.get("antialias") or (mode == "nearest" and rounding != "floor"):
        raise node.refused(f"interpolates by {mode}, {way}")
    size = values.shapes[node.outputs[0]][2:]
    options = {"alignCorners": way == "align_corners", "halfPixelCenters": "half_pixel" in way}
    shape = (tensor.shape[0], *size, tensor.shape[3])
    values.last[node.outputs[0]] = values.graph.add(kind, [tensor, integers(size)], shape, **options)


def _reduce(kind: str) -> Translator:
    def translated(values: Translation, node: OnnxNode) -> None:
        name, result = node.inputs[0], node.outputs[0]
        rank = len(values.shapes[name])
        axes = (
            node.attributes.get("axes")
            or values.numbers(node, 1)
            or list(range(2 if "Global" in node.kind else 0, rank))
        )
        keep = bool(node.attributes.get("keepdims", 1))
        axes = sorted(axis % rank for axis in axes)
        spatial = rank == 4 and axes == [2, 3]
        tensor = values.image(name) if spatial else values.plain(name)
        places = [1, 2] if spatial else axes
        shape = [1 if p in places else size for p, size in enumerate(tensor.shape) if keep or p not in places]
        made = values.graph.add(kind, [tensor, integers(places)], shape, keepDims=keep)
        (values.last if spatial and keep else values.first)[result] = made

    return translated


OPERATORS: dict[str, Translator] = {
    "Abs": _unary("ABS"),
    "Add": _binary("ADD"),
    "AveragePool": average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": conv,
    "ConvTranspose": transposed_conv,
    "Div": _binary("DIV"),
    "Dropout": _same,
    "Elu": _elu,
    "Exp": _unary("EXP"),
    "Flatten": _reshape,
    "Gelu": _gelu,
    "Gemm": _linear,
    "GlobalAveragePool": _reduce("MEAN"),
    "GlobalMaxPool": _reduce("REDUCE_MAX"),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary("HARD_SWISH"),
    "Identity": _same,
    "InstanceNormalization": _instance_norm,
    "LeakyRelu": _leaky_relu,
    "MatMul": _matmul,
    "Max": _binary("MAXIMUM"),
    "MaxPool": max_pool,
    "Min": _binary("MINIMUM"),
    "Mul": _binary("MUL"),
    "Neg": _unary("NEG"),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _binary("POW"),
    "ReduceMax": _reduce("REDUCE_MAX"),
    "ReduceMean": _reduce("MEAN"),
    "Relu": _unary("RELU"),
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": _unary("LOGISTIC"),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": _unary("SQRT"),
    "Squeeze": _reshape,
    "Sub": _binary("SUB"),
    "Tanh": _unary("TANH"),
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
"""The functions that write ONNX operations for LiteRT, by the operation's name."""
