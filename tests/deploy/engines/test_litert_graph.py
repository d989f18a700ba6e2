"""Values are transposed once at most, activations are fused, and a file has aligned constants and metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowrank_cnn.deploy.engines.litert import _read_notes

pytest.importorskip("onnx_tflite")
from onnx_tflite.graph import (
    Graph,
    OnnxNode,
    Operation,
    Tensor,
    Translation,
    constant,
    fused_activation,
    integers,
    packed,
    with_activations,
)

CONSTANTS = {name: np.array(value, np.float32) for name, value in (("zero", 0), ("two", 2), ("six", 6))}


def node(kind: str, inputs: str, output: str) -> OnnxNode:
    return OnnxNode(kind, f"layer/{output}", tuple(inputs.split()), (output,), {})


def test_a_value_is_transposed_once():
    values = Translation({"x": (1, 3, 4, 5)}, {})
    values.first["x"] = Tensor("x", (1, 3, 4, 5))
    assert values.image("x").shape == (1, 4, 5, 3)
    assert values.image("x") is values.image("x")
    assert [operation.kind for operation in values.graph.operations] == ["TRANSPOSE"]
    assert values.stored("x")[1] == [0, 3, 1, 2]


def test_maps_of_one_pixel_are_not_moved():
    values = Translation({"x": (1, 3, 1, 1)}, {})
    values.last["x"] = Tensor("x", (1, 1, 1, 3))
    assert values.plain("x").shape == (1, 3, 1, 1)
    assert [operation.kind for operation in values.graph.operations] == ["RESHAPE"]


def test_constants_are_transposed_at_once():
    array = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    values = Translation({}, {"w": array})
    np.testing.assert_array_equal(values.image("w").data, array.transpose(0, 2, 3, 1))  # type: ignore[arg-type]
    assert not values.graph.operations


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (node("Relu", "x", "y"), "RELU"),
        (node("Clip", "x zero six", "y"), "RELU6"),
        (node("Clip", "x zero", "y"), "RELU"),
        (node("Clip", "x zero two", "y"), None),
        (node("Clip", "x zero computed", "y"), None),
        (node("Sigmoid", "x", "y"), None),
    ],
)
def test_activations_that_join_others(given: OnnxNode, found: str | None):
    assert fused_activation(given, CONSTANTS) == found


def test_an_activation_joins_what_it_alone_reads():
    chain = [node("Conv", "x w", "a"), node("Clip", "a zero six", "b"), node("Relu", "b", "c")]
    joined = with_activations(chain, ["c"], CONSTANTS)
    assert [(each.kind, each.activation, each.outputs) for each in joined] == [
        ("Conv", "RELU6", ("b",)),
        ("Relu", "NONE", ("c",)),
    ]
    assert len(with_activations(chain[:2], ["a", "b"], CONSTANTS)) == 2  # the conv's own result is an output
    shared = [*chain[:2], node("Add", "a b", "d")]
    assert [each.activation for each in with_activations(shared, ["d"], CONSTANTS)] == ["NONE"] * 3


def test_a_value_that_must_be_constant_is_asked_for():
    with pytest.raises(ValueError, match=r"Conv \(layer/a\) needs constants"):
        Translation({}, {}).array(node("Conv", "x w", "a"), 1)


def doubled() -> Graph:
    graph = Graph([Tensor("image", (1, 3))])
    factor = constant(np.array([2, 3, 4], np.float32))
    graph.outputs = [graph.add("MUL", [graph.inputs[0], factor], (1, 3), fusedActivationFunction="RELU")]
    graph.outputs[0].name = "output"
    return graph


def test_a_file_runs_by_the_names_of_its_tensors():
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model_content=packed(doubled())).get_signature_runner()
    given = run(image=np.array([[1, -1, 1]], np.float32))["output"]
    np.testing.assert_array_equal(given, [[2, 0, 4]])


def test_metadata_and_constants():
    from ai_edge_litert import schema_py_generated as schema

    content = packed(doubled(), {"other": b"words", "lowrank_cnn": b'{"a": "b"}'})
    assert _read_notes(content) == b'{"a": "b"}'
    assert _read_notes(packed(doubled())) == b""
    model: Any = schema.Model.GetRootAs(content)
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
        packed(graph)


def test_only_what_moves_is_transposed():
    graph = Graph()
    assert graph.transposed(Tensor("x", (1, 1, 5, 3)), (0, 3, 1, 2)).shape == (1, 3, 1, 5)
    assert graph.transposed(Tensor("x", (1, 4, 1, 1)), (0, 2, 3, 1)).shape == (1, 1, 1, 4)
    assert [operation.kind for operation in graph.operations] == ["TRANSPOSE", "RESHAPE"]


def test_versions_are_those_that_have_what_is_written():
    whole, small = Tensor("x", (1,)), Tensor("y", (1,), "int8")
    assert Operation("CONV_2D", [whole], whole, {}).version == 1
    assert Operation("CONV_2D", [small], small, {}).version == 3
    assert Operation("ADD", [small], small, {}).version == 2
    assert Operation("DEQUANTIZE", [integers([1])], whole, {}).version == 3
