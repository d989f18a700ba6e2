"""An .onnx file names its layers and its free axes, and keeps nothing of the machine that wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.onnx import OnnxRunner, node_macs
from lowrank_cnn.deploy.engines.request import request_for
from lowrank_cnn.deploy.export import export, stored_of, write_request
from lowrank_cnn.method.count import count
from lowrank_cnn.method.schemes import build_conv

HERE = str(Path(__file__).resolve().parents[3]).encode()


class Branches(nn.Module):
    """One activation for all layers, a composite, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.stem, self.strips = nn.Conv2d(3, 4, 3, padding=1), build_conv(4, 4, 3, "lr")
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x))
        return self.head((self.act(self.strips(x)) + self.act(self.stem(x[:, :3]))).mean((2, 3)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    assert export(Branches(), path, input_size=(3, 12, 12), dynamic=("batch", "width")).error < 1e-4
    return path


def test_other_readers_find_standard_operators_alone(file: Path):
    """As far as TensorRT's parser can be checked without it."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions


def test_nodes_have_the_names_of_layers_and_no_paths(file: Path):
    onnx = pytest.importorskip("onnx")
    content = file.read_bytes()
    assert HERE not in content
    assert b"site-packages" not in content
    nodes = onnx.load(file).graph.node
    assert len({node.name for node in nodes}) == len(nodes)
    convs = [node.name for node in nodes if node.op_type == "Conv"]
    assert len(convs) == 4
    assert all(name.startswith(("stem/", "strips")) for name in convs)


def test_axes_are_called_batch_and_width(file: Path):
    runner = OnnxRunner(file)
    (image,) = runner.inputs
    assert (image.name, image.shape) == ("image", ("batch", 3, 12, "width"))
    assert runner.outputs[0].shape == ("batch", 2)


def test_macs_are_read_off_the_nodes(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    export(net, tmp_path / "net.onnx", input_size=(3, 8, 8))
    assert sum(node_macs(tmp_path / "net.onnx").values()) == count(net, (3, 8, 8)).macs


@pytest.mark.parametrize("opset", [99, 0, -1, 10**21])
def test_an_unknown_opset_is_refused(opset: int, tmp_path: Path):
    with pytest.raises(LowRankError, match="opset"):
        export(nn.Conv2d(3, 4, 3), tmp_path / "net.onnx", input_size=(3, 8, 8), opset=opset)


@pytest.mark.parametrize(
    ("layer", "precision", "most"), [(nn.AdaptiveMaxPool2d(1), "fp32", 1e-5), (nn.AvgPool2d(3, 1), "fp16", 0.01)]
)
def test_pools_are_written(layer: nn.Module, precision, most: float, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten()).eval()
    assert export(net, tmp_path / "net.onnx", input_size=(3, 9, 8), precision=precision).error < most


class Standardised(nn.Module):
    """A buffer has the name of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(1, 3, 1, 1))
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.conv(x - self.mean).mean((2, 3)) * 2}


def test_a_buffer_called_as_an_operation_does_not_clash(tmp_path: Path):
    from lowrank_cnn.deploy.optimize import optimize

    x = torch.randn(2, 3, 12, 12)
    fast = optimize(Standardised().eval(), x, compile=False, cache=False, repeats=3)
    assert export(fast, tmp_path / "net.onnx", example_input=x).error < 1e-4


class ToldSize(nn.Module):
    """A transposed conv that is told the size of its output: torch writes no padding that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 3, 4, 2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x), output_size=x.shape[-2:])


def test_what_cannot_be_written_with_free_sizes_is_told_to_fix_them(tmp_path):
    net, path = ToldSize().eval(), tmp_path / "net.onnx"
    with pytest.raises(LowRankError, match=r"It may be with a fixed height and width: leave that out of dynamic"):
        export(net, path, input_size=(3, 8, 8), dynamic=("batch", "height", "width"))
    assert export(net, path, input_size=(3, 8, 8)).error < 1e-5


def test_layers_in_float_keep_their_weights_in_int8(tiny: nn.Module, tmp_path: Path):
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
