"""Values are transposed once at most, and activations join the operation before them where they alone read it."""

from __future__ import annotations

import numpy as np
import pytest

from lowrank_cnn.deploy.engines.litert_file import LitertTensor
from lowrank_cnn.deploy.engines.litert_graph import OnnxNode, Translation, litert_activation, with_activations

CONSTANTS = {name: np.array(value, np.float32) for name, value in (("zero", 0), ("two", 2), ("six", 6))}


def node(kind: str, inputs: str, output: str) -> OnnxNode:
    return OnnxNode(kind, f"layer/{output}", tuple(inputs.split()), (output,), {})


def test_a_value_is_transposed_once():
    values = Translation({"x": (1, 3, 4, 5)}, {})
    values.first["x"] = LitertTensor("x", (1, 3, 4, 5))
    assert values.image("x").shape == (1, 4, 5, 3)
    assert values.image("x") is values.image("x")
    assert [operation.kind for operation in values.graph.operations] == ["TRANSPOSE"]
    assert values.stored("x")[1] == [0, 3, 1, 2]


def test_maps_of_one_pixel_are_not_moved():
    values = Translation({"x": (1, 3, 1, 1)}, {})
    values.last["x"] = LitertTensor("x", (1, 1, 1, 3))
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
    assert litert_activation(given, CONSTANTS) == found


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
