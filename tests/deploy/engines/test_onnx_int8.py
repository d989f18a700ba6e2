"""A layer that stays in float has no quantised weight in the file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowrank_cnn.deploy.export import request_for, stored_of, write_request


def test_layers_in_float_keep_their_weights(tiny, tmp_path):
    onnx = pytest.importorskip("onnx")
    plain, request = request_for(stored_of(tiny, (3, 12, 12)))
    samples = tuple((torch.randn(4, 3, 12, 12),) for _ in range(2))
    request = replace(request, precision="int8", calibration=samples, in_float=("3",))
    write_request(tmp_path / "net.onnx", request, plain)
    model = onnx.load(tmp_path / "net.onnx")
    made = {node.output[0]: node.op_type for node in model.graph.node}
    kinds = [made.get(node.input[1], "float") for node in model.graph.node if node.op_type == "Conv"]
    assert kinds == ["DequantizeLinear", "DequantizeLinear", "float"]
    assert {row.key: row.value for row in model.metadata_props}["precision"] == "int8"
