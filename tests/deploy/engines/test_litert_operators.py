"""Shapes, layers, reductions and resizing give in LiteRT what they give in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.litert_operators import OPERATORS
from lowrank_cnn.deploy.export import export
from tests.deploy.engines.file_checks import assert_file_computes_the_same

pytest.importorskip("ai_edge_litert")
OPERATIONS = {
    "flatten": lambda x: x.flatten(1),
    "to_last": lambda x: x.permute(0, 2, 3, 1),
    "turned": lambda x: x.transpose(2, 3),
    "shuffle": lambda x: x.view(1, 2, 2, 6, 5).transpose(1, 2).flatten(1, 2),
    "concat": lambda x: torch.cat([x, x.relu()], 1),
    "rows": lambda x: torch.cat([x, x.relu()], 2),
    "part": lambda x: x[:, 1:, ::2],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "pad": lambda x: F.pad(x, (-1, 2, 1, 0)),
    "pad_value": lambda x: F.pad(x, (1, 2, 1, 0), value=2.0),
    "reflect": lambda x: F.pad(x, (3, 1, 0, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (3, 1, 0, 6), mode="replicate"),
    "circular": lambda x: F.pad(x, (3, 1, 0, 4), mode="circular"),
    "group_norm": lambda x: F.group_norm(x - 3, 2),
    "one_group": lambda x: F.group_norm(x, 1).relu(),
    "instance_norm": lambda x: F.instance_norm(x, eps=0.1),
    "softmax": lambda x: x.softmax(1),
    "softmax_last": lambda x: x.flatten(1).softmax(-1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear"),
    "corners": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear", align_corners=True),
    "mean": lambda x: x.mean((2, 3)),
    "mean_map": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean_channels": lambda x: x.mean(1),
    "largest": lambda x: x.amax((2, 3)),
    "product": lambda x: x @ x.transpose(2, 3),
}


class Operations(nn.Module):
    """Every function of the table, on a conv's maps or on the image itself, and a classifier."""

    def __init__(self, *, behind_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1) if behind_conv else nn.Identity()
        self.groups, self.alone = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        for norm in (self.groups, self.alone):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.linear, self.rows = nn.Linear(120, 7), nn.Linear(5, 3, bias=False)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.conv(image)
        found = {name: made(x) for name, made in OPERATIONS.items()}
        found |= {"groups": self.groups(x), "alone": self.alone(x)}
        return {**found, "linear": self.linear(x.flatten(1)).relu(), "linear_rows": self.rows(x)}


@pytest.mark.parametrize("behind_conv", [False, True])
def test_operations(behind_conv: bool, tmp_path: Path):
    torch.manual_seed(0)
    net, image = Operations(behind_conv=behind_conv).eval(), torch.randn(1, 4, 6, 5)
    assert_file_computes_the_same(net, image, tmp_path / "net.tflite")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.softmax(2), "Softmax .* another axis"),
        (lambda x: F.interpolate(x, size=(9, 7), mode="bicubic"), "Resize .* interpolates by cubic"),
        (lambda x: x.cumsum(1), "CumSum .* has no translation here"),
    ],
)
def test_others_are_refused_by_name(function, words: str, tmp_path: Path):
    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(LowRankError, match=f"cannot be written for LiteRT: {words}"):
        export(Called(), tmp_path / "net.tflite", input_size=(3, 4, 4))


def test_names_are_those_of_onnx():
    schemas = pytest.importorskip("onnx.defs")
    assert all(schemas.has(name) for name in OPERATORS)
