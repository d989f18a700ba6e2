"""ONNX: write .onnx files whose nodes have the names of layers, and run them in ONNX Runtime on the CPU."""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.deploy.candidates import groups_apart
from lowrank_cnn.deploy.engines.onnx_int8 import quantize_onnx
from lowrank_cnn.deploy.engines.onnx_strips import check_strips, register_strips, use_strips
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Port, Runner
from lowrank_cnn.system.errors import LowRankError, first_line, require
from lowrank_cnn.system.files import regular

if TYPE_CHECKING:
    from numpy import ndarray

_DTYPES = {"float": "float32", "double": "float64"}
_BFLOAT16_OPSET, _FP16_OPSET = 22, 18
"""The first with convs in bfloat16; the last whose average pools ONNX Runtime has in half precision on Arm."""
_SCOPES = "pkg.torch.onnx.name_scopes"


class OnnxRunner(Runner):
    """An .onnx file in ONNX Runtime; `profile` is the prefix of the file that its own profiler writes."""

    engine = "onnxruntime"

    def __init__(self, path: Path, *, threads: int = 0, profile: str | Path | None = None) -> None:
        runtime = require("onnxruntime", extra="onnx", purpose="running an .onnx file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        register_strips(options)
        try:
            file = str(regular(path))
            self.session: Any = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own family of errors, none of them public
            check_strips(str(error))
            raise LowRankError(f"onnxruntime cannot read {path}: {first_line(error)}.") from error
        self.inputs = tuple(map(_port, self.session.get_inputs()))
        self.outputs = tuple(map(_port, self.session.get_outputs()))
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        results = self.session.run(None, inputs)
        return {port.name: result for port, result in zip(self.outputs, results, strict=True)}


def write_onnx(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Write an .onnx file; each group of a composite is rectified and pooled before all are concatenated."""
    require("onnxscript", extra="onnx", purpose="writing ONNX")
    path = folder / f"{stem}.onnx"
    if any(tensor.dtype == torch.float64 for tensor in request.call.tensors.values()):
        raise LowRankError("onnxruntime has no convolutions in torch.float64: export model.float().")
    if request.opset is not None and not 0 < request.opset < 100:
        raise LowRankError(f"an opset is a number like 18, not {request.opset}.")
    program = replace(request, network=groups_apart(request.network).eval()).program
    names: Any = {"input_names": request.call.names, "output_names": request.outputs}
    # The optimiser folds batch norms of bfloat16 into weights of float32, which no engine takes beside bfloat16.
    half = any(tensor.dtype == torch.bfloat16 for tensor in request.call.tensors.values())
    opset = request.opset or (_BFLOAT16_OPSET if half else _FP16_OPSET if request.precision == "fp16" else None)
    with _quiet():
        try:
            onnx: Any = torch.onnx.export(
                _without_global_max_pools(program),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                optimize=not half,
                **names,
            )
        except Exception as error:  # an operator that ONNX lacks, or an opset that torch does not write
            why = first_line(_first_cause(error))
            inner = " and ".join(word for word in request.free if word != "batch")
            fixed = f" It may be with a fixed {inner}: leave that out of dynamic." if inner else ""
            raise LowRankError(f"{request.name} cannot be written as ONNX: {why}.{fixed}") from error
    found = onnx.model.opset_imports[""]
    if opset is not None and found != opset:
        raise LowRankError(f"torch writes this network for opset {found}, and not for {opset}.")
    _name_axes(onnx.model.graph, request)
    _name_nodes(onnx.model.graph)
    if request.strips:
        use_strips(onnx.model)
    onnx.model.metadata_props.clear()
    onnx.model.metadata_props.update(request.metadata | ({"strips": "true"} if request.strips else {}))
    onnx.save(str(path), external_data=False)
    if request.precision == "int8":
        quantize_onnx(path, request)
    return path


def _first_cause(error: BaseException) -> BaseException:
    """The error that the others were raised from: the exporter's own gives general advice alone."""
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


def in_float32(path: Path) -> Path:
    """Write the same graph beside it in float32, for engines that do not compute in bfloat16."""
    onnx = require("onnx", extra="onnx", purpose="checking the written ONNX")
    half, whole = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    model = onnx.load(str(path))
    try:
        onnx.checker.check_model(model, full_check=True)  # an engine that takes bfloat16 checks it so
    except Exception as error:  # the checker has several errors of its own
        raise LowRankError(f"ONNX cannot hold this network in bfloat16: {first_line(error)}.") from error
    graph = model.graph
    for tensor in (t for t in graph.initializer if t.data_type == half):
        values = onnx.numpy_helper.to_array(tensor).astype("float32")
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == half:
            value.type.tensor_type.elem_type = whole
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.name == "to" and attribute.i == half:
            attribute.i = whole
        if attribute.HasField("t") and attribute.t.data_type == half:
            values = onnx.numpy_helper.to_array(attribute.t).astype("float32")
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(values, attribute.t.name))
    twin = path.with_name(f"float32-{path.name}")
    onnx.save(model, str(twin))
    return twin


def node_macs(path: str | Path) -> dict[str, int]:
    """The multiply-accumulates of each node of an .onnx file for one image, read off its graph."""
    onnx = require("onnx", extra="onnx", purpose="reading an .onnx file")
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    values = [*graph.value_info, *graph.output]
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
    found: dict[str, int] = {}
    for node in graph.node:
        weight = weights.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type == "Conv" and weight:
            found[node.name] = prod(weight) * prod(shapes[node.output[0]][2:])
        elif node.op_type in ("Gemm", "MatMul") and weight:
            found[node.name] = prod(weight)
    return found


def _port(node: Any) -> Port:
    kind = str(node.type).removeprefix("tensor(").removesuffix(")")
    return Port(node.name, tuple(node.shape), _DTYPES.get(kind, kind))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporter logs about itself and about packages that it looks for."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name_axes(graph: Any, request: ExportRequest) -> None:
    """Call free axes "batch" or "height" in place of the tracer's own symbols, in whatever depends on them too."""
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
    """Call nodes by their layers, and drop the lines of source, with paths, that the exporter wrote."""
    taken: set[str] = set()
    given = (*graph.inputs, *graph.initializers.values())
    names = {value.name for value in (*given, *(output for node in graph for output in node.outputs))}
    for value in given:
        value.metadata_props.clear()
        plain = value.name.removeprefix("network.")  # the module of ours around a network with other outputs
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
    """The innermost layer and the operation in it, of a list of names from the outermost on."""
    try:
        *_, layer, operation = ast.literal_eval(scopes)
    except (ValueError, SyntaxError):  # a node that a rewriter has made
        return ""
    layer = layer.removeprefix("network.")
    return f"{layer}/{operation}" if layer else str(operation)
