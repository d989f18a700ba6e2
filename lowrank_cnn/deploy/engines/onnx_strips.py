"""Convs with 1x3 and 3x1 filters of an ONNX graph as lowrank::Strips, the compiled operator of `lowrank_strips`.

A node takes over the ReLU behind its conv. Where two such nodes have one input and are concatenated, one node does
both and writes where their results belong. Engines other than ONNX Runtime do not know the operator.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lowrank_cnn.system.errors import LowRankError, require

DOMAIN, OPERATOR = "lowrank", "Strips"
FEWEST = 16
"""Channels below which ONNX Runtime's own convs are as fast."""
_PADS = {(1, 3): [0, 1, 0, 1], (3, 1): [1, 0, 1, 0]}


def register_strips(options: Any) -> None:
    """Let a session know the operator, where it is installed."""
    if find_spec("lowrank_strips") is not None:
        library = require("lowrank_strips", extra="strips", purpose="compiled strips")
        options.register_custom_ops_library(library.onnxruntime_library())


def use_strips(model: Any) -> None:
    """Replace convs of a model of `onnx_ir`; one without such convs is an error."""
    require("lowrank_strips", extra="strips", purpose="writing compiled strips")
    ir: Any = require("onnx_ir", extra="onnx", purpose="writing ONNX")
    graph = model.graph
    convs = [node for node in graph if _is_strip(node)]
    if not convs:
        raise LowRankError(
            f"no conv of this network has 1x3 or 3x1 filters, stride 1 and at least {FEWEST} channels: export it "
            "without strips."
        )
    made = [_strip(ir, graph, node) for node in convs]
    for node in [node for node in graph if node.op_type == "Concat"]:
        if len(node.inputs) == 2 and all(value.producer() in made and _alone(value) for value in node.inputs):
            first, second = (value.producer() for value in node.inputs)
            if first.inputs[0] is second.inputs[0] and _relu(first) == _relu(second) and _axis(node) == 1:
                inputs = [*first.inputs, *second.inputs[1:]]
                _replace(ir, graph, [node, first, second], inputs, relu=_relu(first))
    model.opset_imports[DOMAIN] = 1


def _strip(ir: Any, graph: Any, conv: Any) -> Any:
    """One conv, with the ReLU behind it if nobody else reads its result."""
    x, weight, *rest = conv.inputs
    bias = rest[0] if rest else _zeros(ir, graph, conv, weight)
    readers = [use.node for use in conv.outputs[0].uses()]
    relu = len(readers) == 1 and readers[0].op_type == "Relu"
    return _replace(ir, graph, [readers[0], conv] if relu else [conv], [x, weight, bias], relu=relu)


def _replace(ir: Any, graph: Any, nodes: list[Any], inputs: list[Any], *, relu: bool) -> Any:
    """Put a node in place of others, the first of which gives the result."""
    before = nodes[0].outputs[0]
    name = nodes[-1].name if len(nodes) < 3 else before.producer().name
    made = ir.node(OPERATOR, inputs, attributes={"relu": int(relu)}, domain=DOMAIN, name=name)
    made.outputs[0].shape, made.outputs[0].type, made.outputs[0].name = before.shape, before.type, before.name
    graph.insert_before(nodes[0], made)
    ir.convenience.replace_all_uses_with(before, made.outputs[0])
    for place, value in enumerate(graph.outputs):
        if value is before:
            graph.outputs[place] = made.outputs[0]
    graph.remove(nodes, safe=True)
    return made


def _zeros(ir: Any, graph: Any, conv: Any, weight: Any) -> Any:
    import numpy

    values = numpy.zeros(weight.shape[0], dtype=weight.const_value.numpy().dtype)
    value = ir.Value(name=f"{conv.name}.zeros", const_value=ir.tensor(values, name=f"{conv.name}.zeros"))
    value.shape, value.type = ir.Shape(values.shape), ir.TensorType(weight.dtype)
    graph.register_initializer(value)
    return value


def _is_strip(node: Any) -> bool:
    if node.op_type != "Conv" or node.inputs[1].const_value is None:
        return False
    weight = node.inputs[1].const_value
    kernel, options = tuple(weight.shape[2:]), node.attributes
    same = kernel in _PADS and list(_ints(options, "pads", [0] * 4)) == _PADS[kernel]
    plain = all(set(_ints(options, name, [1])) == {1} for name in ("strides", "dilations"))
    alone = "group" not in options or options["group"].as_int() == 1
    return same and plain and alone and weight.shape[1] >= FEWEST and weight.dtype.name in ("FLOAT", "FLOAT16")


def _ints(options: Any, name: str, default: list[int]) -> list[int]:
    return list(options[name].as_ints()) if name in options else default


def _alone(value: Any) -> bool:
    return len(value.uses()) == 1


def _relu(node: Any) -> bool:
    return bool(node.attributes["relu"].as_int())


def _axis(node: Any) -> int:
    return node.attributes["axis"].as_int()
