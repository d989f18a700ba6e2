"""Files for MNN hold what the network computes and take arrays of every type; a crash of MNN is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export, load

pytest.importorskip("MNN")
NORMS = {
    "its converter lacks an operation": nn.BatchNorm2d(4, track_running_stats=False),
    "MNN cannot run what its converter wrote": nn.LocalResponseNorm(3),
}


class Pixels(nn.Module):
    """Takes pixels as a camera gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.float() / 255)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_files_take_pixels(tmp_path: Path, dtype: torch.dtype):
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=dtype)
    net = Pixels().eval()
    export(net, tmp_path / "net.mnn", example_input=pixels)
    torch.testing.assert_close(load(tmp_path / "net.mnn")(pixels), net(pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("why", NORMS)
def test_what_ends_the_process_of_mnn_is_refused_in_a_sentence(why: str, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), NORMS[why]).eval()
    with pytest.raises(LowRankError, match=f"cannot be written for MNN: {why}"):
        export(net, tmp_path / "net.mnn", input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("mnn", precision).is_file()


def test_a_file_needs_the_names_beside_it(check_target):
    path = check_target("mnn", "fp32")
    path.with_name("net.mnn.json").unlink()
    with pytest.raises(LowRankError, match=r"net\.mnn\.json"):
        open_engine(path)
