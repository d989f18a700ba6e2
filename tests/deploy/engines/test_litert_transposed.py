"""Transposed convs of any stride, padding, dilation and groups give in LiteRT what they give in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import difference
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export

pytest.importorskip("ai_edge_litert")


class Decoders(nn.Module):
    """Transposed convs by name, each on the same maps."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "twice": nn.ConvTranspose2d(4, 6, 2, 2),
                "even": nn.ConvTranspose2d(4, 6, 4, 2, 1, bias=False),
                "odd": nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
                "beyond": nn.ConvTranspose2d(4, 6, 3, 2, 0, output_padding=1),
                "far_beyond": nn.ConvTranspose2d(4, 6, 1, 3, 0, output_padding=2),
                "uneven": nn.ConvTranspose2d(4, 6, (5, 2), (3, 1), (2, 0), output_padding=(2, 0)),
                "dilated": nn.ConvTranspose2d(4, 6, 3, 2, 2, dilation=(2, 3), output_padding=1),
                "grouped": nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=2), nn.ReLU()),
                "depthwise": nn.ConvTranspose2d(4, 8, 3, 2, 1, groups=4),
                "normalised": nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU()),
            }
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {name: part(image) for name, part in self.parts.items()}


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-6), ("fp16", 5e-3)])
def test_transposed_convs(tmp_path: Path, precision: str, most: float):
    torch.manual_seed(0)
    net, image = Decoders().eval(), torch.randn(1, 4, 7, 6)
    export(net, tmp_path / "net.tflite", example_input=image, dynamic=(), precision=precision)  # type: ignore[arg-type]
    given = open_engine(tmp_path / "net.tflite")(image.numpy())
    with torch.no_grad():
        expected = net.double()(image.double())
    errors = {name: difference(torch.from_numpy(given[name]).double(), right) for name, right in expected.items()}
    assert max(errors.values()) < most, errors


def test_those_of_other_dimensions_are_refused_by_name(tmp_path: Path):
    net = nn.Sequential(nn.ConvTranspose1d(4, 6, 2)).eval()
    says = r"ConvTranspose \(0/.*\) is a transposed conv of 1 dimension, and only those of 2"
    with pytest.raises(LowRankError, match=says):
        export(net, tmp_path / "net.tflite", example_input=torch.randn(1, 4, 8), dynamic=())
