"""Files for ONNX: standard operators, names, axes, operations that ONNX lacks, and strips as nodes of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.deploy.engines import onnx as module
from lowrank_cnn.deploy.engines.onnx import OnnxRunner
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.kernels import strips as kernels
from lowrank_cnn.kernels.strips import available
from lowrank_cnn.method.schemes import build_conv

HERE = str(Path(__file__).resolve().parents[3]).encode()

onnx = pytest.importorskip("onnx")


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
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions


def test_nodes_have_the_names_of_layers_and_no_paths(file: Path):
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


built = pytest.mark.skipif(not available(torch.float32), reason="lowrank-strips is not built: `make strips`")


def nodes(path: Path) -> list[tuple[str, dict[str, int]]]:
    """Operators of a file, ours with their attributes."""
    graph = onnx.load(str(path)).graph
    return [
        (node.op_type, {a.name: a.i for a in node.attribute if node.op_type == "Strips"}) for node in graph.node
    ]


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_groups_of_a_layer_are_one_node(dtype: torch.dtype, tiny: nn.Module, tmp_path: Path):
    if not available(dtype):
        pytest.skip(f"this processor does not compute in {dtype}")
    precision = "fp32" if dtype == torch.float32 else "fp16"
    export(tiny, tmp_path / "net.onnx", input_size=(3, 12, 12), strips=True, precision=precision)
    found = nodes(tmp_path / "net.onnx")
    assert [flags for operator, flags in found if operator == "Strips"] == [{"relu": 1, "pool": 1}]
    assert not any(operator in ("Concat", "MaxPool") for operator, _ in found)


@built
@pytest.mark.parametrize(("size", "ceil"), [((9, 12), False), ((8, 7), True)], ids=str)
def test_pools_of_odd_maps(size, ceil: bool, tmp_path: Path):
    torch.manual_seed(0)
    net = nn.Sequential(build_conv(3, 6, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=ceil)).eval()
    written = export(
        net, tmp_path / "net.onnx", input_size=(3, *size), strips=True, dynamic=("batch", "height", "width")
    )
    assert written.error < 1e-5
    assert nodes(tmp_path / "net.onnx")[-1] == ("Strips", {"relu": 1, "pool": 2 if ceil else 1})


@built
def test_only_what_reads_a_conv_alone_is_taken_over(tmp_path: Path):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False),
                nn.Conv2d(4, 4, (3, 1), padding=(1, 0)),
            )
            self.strided = nn.Conv2d(4, 4, (1, 3), padding=(0, 1), stride=2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            joined = torch.cat([y.relu(), self.second(x), y], 1)
            return nn.functional.max_pool2d(joined, 3, 2), self.strided(self.second(y))

    torch.manual_seed(0)
    written = export(Branches().eval(), tmp_path / "net.onnx", input_size=(4, 8, 8), strips=True)
    assert written.error < 1e-5
    found = nodes(tmp_path / "net.onnx")
    assert [flags for operator, flags in found if operator == "Strips"] == [{"relu": 0, "pool": 0}] * 3
    assert {"Conv", "Relu", "Concat", "MaxPool"} <= {operator for operator, _ in found}


@built
def test_a_network_without_strips_and_other_formats_are_refused(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).eval()
    with pytest.raises(LowRankError, match="no conv of this network has 1x3 or 3x1"):
        export(net, tmp_path / "net.onnx", input_size=(3, 8, 8), strips=True)
    with pytest.raises(LowRankError, match="compiled strips run in ONNX Runtime"):
        export(net, tmp_path / "net.pt2", input_size=(3, 8, 8), strips=True)
    assert not list(tmp_path.iterdir())


@built
def test_without_the_package_one_sentence_names_it(tmp_path: Path, monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 4, (1, 3), padding=(0, 1))).eval()
    export(net, tmp_path / "net.onnx", input_size=(3, 8, 8), strips=True)
    monkeypatch.setattr(module, "is_installed", lambda: False)
    monkeypatch.setattr(kernels, "is_installed", lambda: False)
    kernels.library.cache_clear()
    try:
        with pytest.raises(MissingExtra, match="lowrank-strips"):
            open_engine(tmp_path / "net.onnx")
    finally:
        kernels.library.cache_clear()
