from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.torchscript import ScriptRunner, read_script
from lowrank_cnn.deploy.export import export

SIZE = (3, 12, 12)


def test_a_file_gives_what_the_network_gives_for_any_batch(tiny: nn.Module, tmp_path: Path):
    assert export(tiny, tmp_path / "net.ts", input_size=SIZE).error < 1e-5
    runner = ScriptRunner(tmp_path / "net.ts")
    assert [port.shape for port in runner.inputs] == [("batch", *SIZE)]
    images = torch.randn(5, *SIZE)
    np.testing.assert_allclose(runner(images.numpy())["output"], tiny(images).detach(), atol=1e-5)
    module, metadata = read_script(tmp_path / "net.ts")
    assert not module.training
    assert metadata.keys() >= {"inputs", "outputs"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_of_others_are_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "text.ts").write_text("not a network")
    with pytest.raises(LowRankError, match="is not a TorchScript file"):
        read_script(tmp_path / "text.ts")
    torch.jit.trace(nn.Conv2d(3, 4, 3), torch.zeros(1, *SIZE)).save(str(tmp_path / "plain.ts"))
    with pytest.raises(LowRankError, match="does not name its inputs"):
        ScriptRunner(tmp_path / "plain.ts")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class WithOwnGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def test_a_network_with_a_gradient_of_its_own_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(LowRankError, match=r"TorchScript cannot hold the network: .*'Doubled'"):
        export(WithOwnGradient(), tmp_path / "own.ts", input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())
