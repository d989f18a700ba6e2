"""Each operation on single values gives in LiteRT what it gives in torch, with the channels first or last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.litert_elementwise import ELEMENTWISE
from lowrank_cnn.deploy.export import export
from tests.deploy.engines.file_checks import assert_file_computes_the_same

pytest.importorskip("ai_edge_litert")
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": lambda x: F.relu6(4 * x),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "power": lambda x: (x.abs() + 1) ** 1.5,
    "arithmetic": lambda x: (3 - x) / 2 * torch.exp(-x.abs()).sqrt(),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "extremes": lambda x: torch.maximum(x, torch.minimum(x.flip(()), -x)),
}


class Activations(nn.Module):
    """Every function of the table, on a conv's maps (channels last there) or on the image itself."""

    def __init__(self, *, behind_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1) if behind_conv else nn.Identity()
        self.slopes = nn.PReLU(4 if behind_conv else 3)
        self.norm = nn.BatchNorm2d(4 if behind_conv else 3)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.conv(image)
        found = {name: made(x) for name, made in ACTIVATIONS.items()}
        return {**found, "prelu": self.slopes(x), "norm": self.norm(x + 1).relu()}


@pytest.mark.parametrize("behind_conv", [False, True])
def test_activations_and_arithmetic(behind_conv: bool, tmp_path: Path):
    torch.manual_seed(0)
    net, image = Activations(behind_conv=behind_conv).eval(), torch.randn(1, 3, 6, 5)
    assert_file_computes_the_same(net, image, tmp_path / "net.tflite")


def test_an_elu_of_another_slope_is_refused(tmp_path: Path):
    with pytest.raises(LowRankError, match=r"Elu .* another alpha than 1"):
        export(nn.ELU(0.5), tmp_path / "net.tflite", input_size=(3, 4, 4))


def test_names_are_those_of_onnx():
    schemas = pytest.importorskip("onnx.defs")
    assert all(schemas.has(name) for name in ELEMENTWISE)
