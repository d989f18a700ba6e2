"""What a file says of where its graph comes from: the names of layers, and nothing of the machine that wrote it.

The exporters keep the lines of source, with their paths, that every operation was traced from.
"""

from __future__ import annotations

import ast
from itertools import chain, count
from typing import Any

import torch
from torch import fx

_SCOPES = "pkg.torch.onnx.name_scopes"


def without_traces(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program, its operations without the lines of source they come from."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def name_nodes(graph: Any) -> None:
    """Call the nodes of an ONNX graph by their layers, and drop what else the exporter wrote down about them."""
    taken: set[str] = set()
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
    return f"{layer}/{operation}" if layer else str(operation)
