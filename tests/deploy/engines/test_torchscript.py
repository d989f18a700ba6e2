from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.engines.torchscript import ScriptRunner, read_script
from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.system.errors import LowRankError

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
