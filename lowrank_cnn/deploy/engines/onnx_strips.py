"""Convs with 1x3 and 3x1 filters of an ONNX graph as lowrank::Strips, the compiled operator of `lowrank_strips`.

A node takes over the ReLU and the 2x2 max-pool behind its conv. Where two such nodes have one input and are
concatenated, one node does both and writes where their results belong. Engines other than ONNX Runtime do not know
the operator.
"""

from __future__ import annotations

from typing import Any

from lowrank_cnn.kernels.strips import is_installed, library
from lowrank_cnn.system.errors import LowRankError, require

DOMAIN, OPERATOR = "lowrank", "Strips"
_PADS = {(1, 3): [0, 1, 0, 1], (3, 1): [1, 0, 1, 0]}


def register_strips(options: Any) -> None:
    """Let a session know the operator, where it is installed."""
    if is_installed():
        options.register_custom_ops_library(library().onnxruntime_library())


def check_strips(message: str) -> None:
    """Raise an error that names the missing package if a session failed because it lacks the operator."""
    if f"{DOMAIN}:{OPERATOR}" in message:
        library()


def use_strips(model: Any) -> None:
    """Replace convs of a model of `onnx_ir`; one without such convs is an error."""
    library()
    ir: Any = require("onnx_ir", extra="onnx", purpose="writing ONNX")
    graph = model.graph
    convs = [node for node in graph if _is_strip(node)]
    if not convs:
        raise LowRankError(
            "no conv of this network has 1x3 or 3x1 filters and stride 1: export it without strips."
        )
    for conv in convs:
        x, weight, *bias = conv.inputs
        made = _replace(ir, graph, [conv], [x, weight, bias[0] if bias else _zeros(ir, graph, conv, weight)])
        _take_over(ir, graph, made)
    for concat in [node for node in graph if _joins(node)]:
        first, second = (value.producer() for value in concat.inputs)
        inputs = [*first.inputs, *second.inputs[1:]]
        made = _replace(ir, graph, [concat, first, second], inputs, **_flags(first))
        _take_over(ir, graph, made)
    model.opset_imports[DOMAIN] = 1


def _take_over(ir: Any, graph: Any, node: Any) -> None:
    """Move a ReLU, then a pool, into a node if nothing else reads its result."""
    while (behind := _reader(node.outputs[0])) is not None:
        flags = _flags(node)
        if behind.op_type == "Relu" and not flags["relu"]:
            flags["relu"] = 1
        elif behind.op_type == "MaxPool" and not flags["pool"]:
            flags["pool"] = _pool(behind)
        if flags == _flags(node):
            return
        node = _replace(ir, graph, [behind, node], list(node.inputs), **flags)


def _joins(node: Any) -> bool:
    """Whether a node concatenates the results of two strip nodes that have the same input and epilogue."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or node.attributes["axis"].as_int() not in (1, -3):
        return False
    both = [value.producer() for value in node.inputs]
    ours = all(each is not None and each.op_type == OPERATOR and _reader(each.outputs[0]) is node for each in both)
    return ours and both[0].inputs[0] is both[1].inputs[0] and _flags(both[0]) == _flags(both[1])


def _replace(ir: Any, graph: Any, nodes: list[Any], inputs: list[Any], *, relu: int = 0, pool: int = 0) -> Any:
    """Put a node in place of others, the first of which gives the result."""
    before = nodes[0].outputs[0]
    flags = {"relu": relu, "pool": pool}
    made = ir.node(OPERATOR, inputs, attributes=flags, domain=DOMAIN, name=nodes[0 if len(nodes) > 2 else -1].name)
    made.outputs[0].shape, made.outputs[0].type, made.outputs[0].name = before.shape, before.type, before.name
    graph.insert_before(nodes[0], made)
    ir.convenience.replace_all_uses_with(before, made.outputs[0], replace_graph_outputs=True)
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
    return same and plain and alone and weight.dtype.name in ("FLOAT", "FLOAT16")


def _ints(options: Any, name: str, default: list[int]) -> list[int]:
    return list(options[name].as_ints()) if name in options else default


def _pool(node: Any) -> int:
    """The attribute for a pool with windows of 2x2, side by side: 1, or 2 with ceil_mode; 0 for other pools."""
    options = node.attributes
    sizes = [*_ints(options, "kernel_shape", []), *_ints(options, "strides", [1, 1])]
    plain = not any(_ints(options, "pads", [])) and set(_ints(options, "dilations", [1])) == {1}
    ceil = "ceil_mode" in options and options["ceil_mode"].as_int() == 1
    return (2 if ceil else 1) if sizes == [2] * 4 and plain else 0


def _reader(value: Any) -> Any:
    """The one node that reads a value; None if there are several, or it is a result of the graph."""
    uses = value.uses()
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _flags(node: Any) -> dict[str, int]:
    return {name: node.attributes[name].as_int() for name in ("relu", "pool")}
