"""Transposed convs for LiteRT, whose own has no groups and no dilation, and pads as SAME or VALID alone.

A conv is computed whole and then cropped, which is any padding. Groups are computed one by one, and a dilated
kernel has zeros between its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.engines.litert_file import LitertGraph, LitertTensor, constant, integers
from lowrank_cnn.deploy.engines.litert_graph import OnnxNode, Translation
from lowrank_cnn.deploy.engines.litert_windows import crop, fill


def transposed_conv(values: Translation, node: OnnxNode) -> None:
    """A transposed conv of images."""
    import numpy

    weight, attributes, graph = values.array(node, 1), node.attributes, values.graph
    if weight.ndim != 4:
        sides = counted(weight.ndim - 2, "dimension")
        raise node.refused(f"is a transposed conv of {sides}, and only those of 2 are written")
    weight = _spread(weight, attributes.get("dilations", [1, 1]))
    steps, groups = attributes.get("strides", [1, 1]), attributes.get("group", 1)
    batch, channels, *size = values.shapes[node.outputs[0]]
    bias = values.array(node, 2) if len(node.inputs) > 2 else numpy.zeros(channels, weight.dtype)
    bounds = [(start, start + n, 1) for start, n in zip(attributes.get("pads", [0] * 4), size, strict=False)]
    tensor = _reaching(graph, values.image(node.inputs[0]), bounds, steps, weight.shape[2:])
    parts, start = [], 0
    for kernel, terms in zip(numpy.split(weight, groups), numpy.split(bias, groups), strict=True):
        whole = [(0, length, 1) for length in tensor.shape[:3]]
        part = crop(graph, tensor, [*whole, (start, start + len(kernel), 1)])
        made = _whole(graph, part, kernel, terms, steps)
        parts.append(crop(graph, made, [(0, batch, 1), *bounds, (0, len(terms), 1)]))
        start += len(kernel)
    if groups > 1:
        shape = (batch, *size, channels)
        parts = [graph.add("CONCATENATION", parts, shape, axis=3, fusedActivationFunction="NONE")]
    values.last[node.outputs[0]] = parts[0]


def _whole(graph: LitertGraph, tensor: LitertTensor, kernel: Any, bias: Any, steps: Sequence[int]) -> LitertTensor:
    """Everything that a kernel of [in, out, height, width] makes of a tensor."""
    sides = zip(tensor.shape[1:3], steps, kernel.shape[2:], strict=True)
    shape = (tensor.shape[0], *((n - 1) * step + taps for n, step, taps in sides), len(bias))
    parts = [integers(shape), constant(kernel.transpose(1, 2, 3, 0)), tensor, constant(bias)]
    options = {"padding": "VALID", "strideH": steps[0], "strideW": steps[1]}
    return graph.add("TRANSPOSE_CONV", parts, shape, tensor.dtype, **options)


def _spread(weight: Any, dilations: Sequence[int]) -> Any:
    """A kernel with zeros between its taps, which computes what a dilated one does."""
    import numpy

    sizes = [step * (taps - 1) + 1 for step, taps in zip(dilations, weight.shape[2:], strict=True)]
    wide = numpy.zeros((*weight.shape[:2], *sizes), weight.dtype)
    wide[:, :, :: dilations[0], :: dilations[1]] = weight
    return wide


def _reaching(
    graph: LitertGraph,
    tensor: LitertTensor,
    bounds: Sequence[tuple[int, int, int]],
    steps: Sequence[int],
    kernel: Sequence[int],
) -> LitertTensor:
    """The input with zeros behind it where the result ends behind the last tap, as an output padding may."""
    axes = zip(bounds, steps, kernel, tensor.shape[1:3], strict=True)
    zeros = [(0, max(0, -(-(end - taps) // step) + 1 - size)) for (_, end, _), step, taps, size in axes]
    return fill(graph, tensor, [(0, 0), *zeros, (0, 0)])
