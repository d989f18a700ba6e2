"""A .tflite file has aligned constants, names for its inputs and outputs, and our metadata in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowrank_cnn.deploy.engines.litert_file import (
    LitertGraph,
    LitertTensor,
    Operation,
    constant,
    integers,
    packed,
    read_notes,
)

pytest.importorskip("ai_edge_litert")


def doubled() -> LitertGraph:
    graph = LitertGraph([LitertTensor("image", (1, 3))])
    factor = constant(np.array([2, 3, 4], np.float32))
    graph.outputs = [graph.add("MUL", [graph.inputs[0], factor], (1, 3), fusedActivationFunction="RELU")]
    graph.outputs[0].name = "output"
    return graph


def test_a_file_runs_by_the_names_of_its_tensors():
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model_content=packed(doubled(), b"{}")).get_signature_runner()
    given = run(image=np.array([[1, -1, 1]], np.float32))["output"]
    np.testing.assert_array_equal(given, [[2, 0, 4]])


@pytest.mark.parametrize("half", [False, True])
def test_metadata_and_constants(half: bool):
    from ai_edge_litert import schema_py_generated as schema

    content = packed(doubled(), b'{"a": "b"}', half=half)
    assert read_notes(content) == b'{"a": "b"}'
    model: Any = schema.Model.GetRootAs(content)
    names = [model.Metadata(place).Name() for place in range(model.MetadataLength())]
    assert (b"reduced_precision_support" in names) == half
    for place in range(model.BuffersLength()):
        data = model.Buffers(place).DataAsNumpy()
        if isinstance(data, np.ndarray):
            start = _address(data) - _address(np.frombuffer(content, np.uint8))
            assert start % 16 == 0


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_an_option_that_the_schema_lacks_is_an_error():
    graph = doubled()
    graph.operations[0].options["strength"] = 3
    with pytest.raises(AttributeError, match="MulOptionsT has no strength"):
        packed(graph, b"")


def test_only_what_moves_is_transposed():
    graph = LitertGraph()
    assert graph.transposed(LitertTensor("x", (1, 1, 5, 3)), (0, 3, 1, 2)).shape == (1, 3, 1, 5)
    assert graph.transposed(LitertTensor("x", (1, 4, 1, 1)), (0, 2, 3, 1)).shape == (1, 1, 1, 4)
    assert [operation.kind for operation in graph.operations] == ["TRANSPOSE", "RESHAPE"]


def test_versions_are_those_that_have_what_is_written():
    whole, small = LitertTensor("x", (1,)), LitertTensor("y", (1,), "int8")
    assert Operation("CONV_2D", [whole], whole, {}).version == 1
    assert Operation("CONV_2D", [small], small, {}).version == 3
    assert Operation("ADD", [small], small, {}).version == 2
    assert Operation("DEQUANTIZE", [integers([1])], whole, {}).version == 3
