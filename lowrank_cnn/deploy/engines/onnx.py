"""ONNX: write .onnx files whose nodes have the names of layers, and run them in ONNX Runtime on the CPU."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, explained, first_line, require
from lowrank_cnn.deploy.blocks import groups_apart
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Port, Runner, quiet
from lowrank_cnn.kernels.strips import is_installed, library
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models.network_file import dtype_of
from lowrank_cnn.train.int8 import widen

_DTYPES = {"float": "float32", "double": "float64"}
_FP16_OPSET = 18
"""The last opset whose average pools ONNX Runtime has in half precision on Arm."""
_SCOPES = "pkg.torch.onnx.name_scopes"


class OnnxRunner(Runner):
    engine = "onnxruntime"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        runtime = require("onnxruntime", extra="onnx", purpose="running an .onnx file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if is_installed():
            options.register_custom_ops_library(library().onnxruntime_library())
        try:
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own error classes are not public
            if f"{DOMAIN}:{OPERATOR}" in str(error):
                library()  # its error names the package that is missing
            raise
        self.inputs = tuple(map(_port, self.session.get_inputs()))
        self.outputs = tuple(map(_port, self.session.get_outputs()))
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)

    def _run(self, arrays: Arrays) -> Arrays:
        return self.session.run(None, {port.name: array for port, array in zip(self.inputs, arrays, strict=True)})


def _port(node: Any) -> Port:
    kind = str(node.type).removeprefix("tensor(").removesuffix(")")
    return Port(node.name, tuple(node.shape), _DTYPES.get(kind, kind))


def write_onnx(path: Path, request: ExportRequest) -> None:
    """Write an .onnx file; each group of a composite is rectified and pooled before all are concatenated."""
    require("onnxscript", extra="onnx", purpose="writing ONNX")
    kinds = {dtype_of(request.network), *(tensor.dtype for tensor in request.call.tensors.values())}
    if missing := kinds & {torch.float64, torch.bfloat16}:
        raise LowRankError(f"onnxruntime has no convolutions in {missing.pop()}: export model.float().")
    if request.opset is not None and not 0 < request.opset < 100:
        raise LowRankError(f"opset must be a number such as 18, not {request.opset}.")
    program = replace(request, network=groups_apart(request.network).eval()).program
    opset = request.opset or (_FP16_OPSET if request.precision == "fp16" else None)
    names: Any = {"input_names": request.call.names, "output_names": request.outputs}
    with quiet():
        try:
            program = _without_global_max_pools(program)
            onnx: Any = torch.onnx.export(program, dynamo=True, **names, opset_version=opset, verbose=False)
        except Exception as error:  # an operator that ONNX lacks, or an opset that torch does not write
            why = first_line(_first_cause(error))
            inner = " and ".join(word for word in request.free if word != "batch")
            fixed = f" It may be with a fixed {inner}: leave that out of dynamic." if inner else ""
            raise LowRankError(f"{request.name} cannot be written as ONNX: {why}.{fixed}") from error
    found = onnx.model.opset_imports[""]
    if opset is not None and found != opset:
        raise LowRankError(f"the exporter produced opset {found}; opset {opset} is not supported here.")
    _name_axes(onnx.model.graph, request)
    _name_nodes(onnx.model.graph)
    if request.strips:
        _use_strips(onnx.model)
    onnx.model.metadata_props.clear()
    onnx.model.metadata_props.update(request.metadata | ({"strips": "true"} if request.strips else {}))
    onnx.save(str(path), external_data=False)
    if request.precision == "int8":
        _quantize(path, request)


def _first_cause(error: BaseException) -> BaseException:
    """The original error: the exporter's own message only gives general advice."""
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _without_global_max_pools(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace adaptive max-pools to one value by maxima: torch 2.11 does not write such pools as ONNX."""
    pool = torch.ops.aten.adaptive_max_pool2d.default
    if torch.__version__ >= "2.13" or all(node.target is not pool for node in program.graph.nodes):
        return program

    def as_maximum(x: torch.Tensor, size: list[int]) -> Any:
        if list(size) != [1, 1]:
            return NotImplemented
        values, places = x.flatten(-2).max(-1)
        return values[..., None, None], places[..., None, None]

    return program.run_decompositions({pool: as_maximum})


def _name_axes(graph: Any, request: ExportRequest) -> None:
    """Rename the tracer's symbols of free axes to "batch" or "height", also in expressions of them."""
    words = {}
    for value in graph.inputs:
        for axis, word in request.axes[value.name].items():
            words.setdefault(str(value.shape[axis]), word)
    if not words:
        return
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    for value in {*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)}:
        if value.shape is not None:
            sizes = (size if isinstance(size, int) else str(size) for size in value.shape)
            named = (symbols.sub(lambda found: words[found[0]], s) if isinstance(s, str) else s for s in sizes)
            value.shape = type(value.shape)(list(named))


def _name_nodes(graph: Any) -> None:
    """Name nodes after their layers, and drop the exporter's source lines, which contain paths."""
    taken: set[str] = set()
    given = (*graph.inputs, *graph.initializers.values())
    names = {value.name for value in (*given, *(output for node in graph for output in node.outputs))}
    for value in given:
        value.metadata_props.clear()
        plain = value.name.removeprefix("network.")  # our wrapper around a network with other outputs
        if plain not in names:  # a buffer and the result of an operation may both be called "mean"
            value.name = plain
    for node in graph:
        name = _layer(node.metadata_props.get(_SCOPES, "")) or str(node.name)
        numbered = (f"{name}_{number}" for number in count(2))
        node.name = next(each for each in chain([name], numbered) if each not in taken)
        taken.add(node.name)
        for part in (node, *node.outputs):
            part.metadata_props.clear()


def _layer(scopes: str) -> str:
    """The innermost layer and its operation, from a list of names that starts with the outermost."""
    try:
        *_, layer, operation = ast.literal_eval(scopes)
    except (ValueError, SyntaxError):  # a node that a rewriter has made
        return ""
    layer = layer.removeprefix("network.")
    return f"{layer}/{operation}" if layer else str(operation)


_AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")
"""Operations that stay in float: the tool would round means to the coarse levels of their inputs."""
_READERS = ("Conv", "Gemm", "MatMul", *_AVERAGES)  # whose input may have a range that training found
_SAME_RANGE = ("MaxPool", "Reshape", "Flatten", "Squeeze", "Transpose")  # whose output has their input's range


def _quantize(path: Path, request: ExportRequest) -> None:
    """Replace a float32 .onnx file by one with unsigned 8-bit activations and signed 8-bit weights."""
    from numpy import float32

    tool: Any = require("onnxruntime.quantization", extra="onnx", purpose="int8 in ONNX")
    onnx: Any = require("onnx", extra="onnx", purpose="int8 in ONNX")
    nodes = list(onnx.load(str(path)).graph.node)
    kept = [node.name for node in nodes if node.op_type in _AVERAGES or request.is_in_float(node.name)]
    found = _ranges(nodes, request).items()
    ranges = {name: [{"rmin": float32(low), "rmax": float32(high)}] for name, (low, high) in found}
    samples = iter(
        {name: tensor.numpy() for name, tensor in zip(request.call.names, sample, strict=True)}
        for sample in request.calibration
    )
    target = path.with_name(f"int8-{path.name}")
    with explained("onnxruntime cannot quantise this network"):
        with quiet():  # it advises to preprocess the graph, which needs no preprocessing
            tool.quantize_static(
                str(path),
                str(target),
                SimpleNamespace(get_next=lambda: next(samples, None)),
                per_channel=True,
                activation_type=tool.QuantType.QUInt8,
                weight_type=tool.QuantType.QInt8,
                nodes_to_exclude=kept,
                extra_options={"TensorQuantOverrides": ranges},
            )
        model = onnx.load(str(target))
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, {**request.metadata, "precision": "int8"})
        onnx.save(model, str(path))
    target.unlink()


def _ranges(nodes: list[Any], request: ExportRequest) -> dict[str, tuple[float, float]]:
    """The ranges that training found, by the tensors that have them."""
    makers = {node.output[0]: node for node in nodes}
    found: dict[str, tuple[float, float]] = {}
    for node in nodes:
        ends = request.trained_range(node.name) if node.op_type in _READERS else None
        while ends is not None and node is not None:
            widen(found, node.input[0], ends)
            maker = makers.get(node.input[0])
            node = maker if maker is not None and maker.op_type in _SAME_RANGE else None
    return found


# 1x3 and 3x1 convs as lowrank::Strips, the operator of `lowrank_strips` for ONNX Runtime. A node includes the ReLU
# and the 2x2 max-pool after its conv; one node computes two convs of one input that are concatenated.

DOMAIN, OPERATOR = "lowrank", "Strips"
_PADS = {(1, 3): [0, 1, 0, 1], (3, 1): [1, 0, 1, 0]}


def _use_strips(model: Any) -> None:
    """Replace convs of an `onnx_ir` model; a model without such convs is an error."""
    library()
    ir: Any = require("onnx_ir", extra="onnx", purpose="writing ONNX")
    graph = model.graph
    convs = [node for node in graph if _is_strip(node)]
    if not convs:
        raise LowRankError("no conv of this network has 1x3 or 3x1 filters and stride 1: export without strips.")
    if convs[0].inputs[1].dtype == ir.DataType.FLOAT16 and not library().has_half():
        raise LowRankError("compiled strips need an Arm processor in fp16: export fp32, or without strips.")
    for conv in convs:
        x, weight, *bias = conv.inputs
        _replace(ir, graph, [conv], [x, weight, bias[0] if bias else _zeros(ir, graph, conv, weight)])
    for concat in [node for node in graph if _joins(node)]:
        first, second = (value.producer() for value in concat.inputs)
        _replace(ir, graph, [concat, first, second], [*first.inputs, *second.inputs[1:]], **_flags(first))
    model.opset_imports[DOMAIN] = 1


def _joins(node: Any) -> bool:
    """Whether a node concatenates the results of two strip nodes that have the same input and epilogue."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or node.attributes["axis"].as_int() not in (1, -3):
        return False
    both = [value.producer() for value in node.inputs]
    ours = all(
        each is not None and each.op_type == OPERATOR and _only_reader(each.outputs[0]) is node for each in both
    )
    return ours and both[0].inputs[0] is both[1].inputs[0] and _flags(both[0]) == _flags(both[1])


def _replace(ir: Any, graph: Any, nodes: list[Any], inputs: list[Any], *, relu: int = 0, pool: int = 0) -> None:
    """Replace nodes by one, which includes the ReLU and the pool after them; the first of them has the result."""
    before, name = nodes[0].outputs[0], nodes[0 if len(nodes) > 2 else -1].name
    made = ir.node(OPERATOR, inputs, attributes={"relu": relu, "pool": pool}, domain=DOMAIN, name=name)
    made.outputs[0].shape, made.outputs[0].type, made.outputs[0].name = before.shape, before.type, before.name
    graph.insert_before(nodes[0], made)
    ir.convenience.replace_all_uses_with(before, made.outputs[0], replace_graph_outputs=True)
    graph.remove(nodes, safe=True)
    behind = _only_reader(made.outputs[0])
    if behind is not None and behind.op_type == "Relu" and not relu:
        _replace(ir, graph, [behind, made], inputs, relu=1, pool=pool)
    elif behind is not None and behind.op_type == "MaxPool" and not pool and (kind := _pool(behind)):
        _replace(ir, graph, [behind, made], inputs, relu=relu, pool=kind)


def _zeros(ir: Any, graph: Any, conv: Any, weight: Any) -> Any:
    import numpy

    values = numpy.zeros(weight.shape[0], dtype=weight.const_value.numpy().dtype)
    value = ir.Value(name=f"{conv.name}.zeros", const_value=ir.tensor(values, name=f"{conv.name}.zeros"))
    value.shape, value.type = ir.Shape(values.shape), ir.TensorType(weight.dtype)
    graph.register_initializer(value)
    return value


def _is_strip(node: Any) -> bool:
    if node.op_type != "Conv" or (weight := node.inputs[1].const_value) is None:
        return False
    options = node.attributes
    same = _PADS.get(tuple(weight.shape[2:])) == _ints(options, "pads", [0] * 4)
    plain = all(set(_ints(options, name, [1])) == {1} for name in ("strides", "dilations"))
    alone = "group" not in options or options["group"].as_int() == 1
    return same and plain and alone and weight.dtype.name in ("FLOAT", "FLOAT16")


def _ints(options: Any, name: str, default: list[int]) -> list[int]:
    return list(options[name].as_ints()) if name in options else default


def _pool(node: Any) -> int:
    """The attribute for a pool with disjoint 2x2 windows: 1, or 2 with ceil_mode; 0 for other pools."""
    options = node.attributes
    sizes = [*_ints(options, "kernel_shape", []), *_ints(options, "strides", [1, 1])]
    plain = not any(_ints(options, "pads", [])) and set(_ints(options, "dilations", [1])) == {1}
    ceil = "ceil_mode" in options and options["ceil_mode"].as_int() == 1
    return (2 if ceil else 1) if sizes == [2] * 4 and plain else 0


def _only_reader(value: Any) -> Any:
    """The one node that reads a value; None if there are several, or it is a result of the graph."""
    uses = value.uses()
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _flags(node: Any) -> dict[str, int]:
    return {name: node.attributes[name].as_int() for name in ("relu", "pool")}


_USAGE = """import numpy, onnxruntime; {made}
session = onnxruntime.InferenceSession({file})
logits = session.run(None, {{{named}}})[0]"""
_WITH_STRIPS = """import numpy, lowrank_strips, onnxruntime; {made}
options = onnxruntime.SessionOptions(); options.register_custom_ops_library(lowrank_strips.onnxruntime_library())
logits = onnxruntime.InferenceSession({file}, options).run(None, {{{named}}})[0]"""


def _in_single(part: nn.Module, strips: bool) -> bool:
    """Whether a layer of an fp16 file computes in float32.

    On Arm, ONNX Runtime 1.31 computes convs with channel groups wrongly in half precision, unless they are
    depthwise. Files with strips are for the CPU, where ONNX Runtime multiplies matrices much faster in float32.
    """
    if not isinstance(part, nn.Conv2d | CompositeConv2d):
        return strips and type(part) is nn.Linear
    return part.groups > 1 and not part.groups == part.in_channels == part.out_channels


ONNX = Engine(".onnx", OnnxRunner, write_onnx, _USAGE, "onnxruntime", int8=True, in_single=_in_single)
ONNX_STRIPS = replace(ONNX, usage=_WITH_STRIPS, package="lowrank_strips", int8=False, strips=True)
