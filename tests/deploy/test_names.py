"""Exported graphs name their layers, and keep nothing of the machine that wrote them."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from torch import nn

from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.models import create_model

HERE = str(Path(__file__).resolve().parents[2]).encode()


@pytest.fixture(scope="module")
def network():
    return create_model("googlenet-lr", num_classes=5, width=0.1, image_size=64).eval()


def test_a_program_keeps_no_paths(network, tmp_path):
    export(network, tmp_path / "net.pt2")
    with ZipFile(tmp_path / "net.pt2") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    assert not [name for name, content in parts.items() if HERE in content or b"site-packages" in content]


def test_names_stay_apart_whatever_torch_calls_its_operations(tmp_path):
    act = nn.SiLU()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), act, nn.Conv2d(4, 4, 3), act, nn.Conv2d(4, 4, 3), act).eval()
    assert export(net, tmp_path / "net.onnx", input_size=(3, 12, 12)).error < 1e-4


def test_onnx_has_the_names_of_layers_and_no_paths(network, tmp_path):
    onnx = pytest.importorskip("onnx")
    export(network, tmp_path / "net.onnx")
    content = (tmp_path / "net.onnx").read_bytes()
    assert HERE not in content
    assert b"site-packages" not in content
    names = [node.name for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert len(set(names)) == len(names)
    convs = [node.name for node in onnx.load(tmp_path / "net.onnx").graph.node if node.op_type == "Conv"]
    assert all(name.startswith(("stem.", "inceptions.")) for name in convs)
