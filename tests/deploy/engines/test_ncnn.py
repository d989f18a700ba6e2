"""Files for ncnn hold what the network computes, in float32 and half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export, load


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("ncnn", precision).is_file()


def test_a_file_loads_as_a_module_and_needs_its_weights(tiny, tmp_path):
    pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    path, images = tmp_path / "net.param", torch.randn(2, 3, 12, 12)
    export(tiny, path, input_size=(3, 12, 12))
    torch.testing.assert_close(load(path)(images), tiny(images), atol=1e-4, rtol=1e-4)
    (tmp_path / "net.ncnn.bin").unlink()
    with pytest.raises(LowRankError, match=r"ncnn cannot read .*net\.ncnn\.bin"):
        open_engine(path)


@pytest.mark.parametrize("size", [11, 12])
@pytest.mark.parametrize("pool", [nn.AvgPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(3, 2, 1, ceil_mode=True)])
def test_average_pools_that_reach_over_the_border(pool: nn.Module, size: int, tmp_path):
    pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pool).eval()
    assert export(network, tmp_path / "net.param", input_size=(3, size, size)).error < 1e-4


def test_an_operation_that_ncnn_lacks_is_named(tmp_path):
    pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    with pytest.raises(LowRankError, match="ncnn"):
        export(Strided(), tmp_path / "net.param", input_size=(3, 12, 12))
    assert not list(tmp_path.iterdir())


class Strided(nn.Module):
    """Takes every other pixel, which ncnn cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, ::2, ::2]
