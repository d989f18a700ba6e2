"""Compiled strips in .onnx files: what nodes take over, parity by running, and one sentence for what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.deploy.engines import onnx as module
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.kernels import strips as kernels
from lowrank_cnn.kernels.strips import available
from lowrank_cnn.method.schemes import build_conv

built = pytest.mark.skipif(not available(torch.float32), reason="lowrank-strips is not built: `make strips`")
onnx = pytest.importorskip("onnx")


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
    assert written.error is not None
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
    assert written.error is not None
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
