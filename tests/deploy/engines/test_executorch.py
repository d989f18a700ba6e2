"""Files for executorch hold what the network computes, in float32 and half precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.executorch import ExecuTorchRunner
from lowrank_cnn.deploy.quantize import quantize


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("executorch", precision).is_file()


def test_a_runtime_built_for_another_torch_is_named():
    class Mismatched:
        def execute(self, _: object) -> None:
            raise RuntimeError("tensor does not have a device\nException raised from device_default")

    pytest.importorskip("executorch")
    runner = object.__new__(ExecuTorchRunner)
    runner.method = Mismatched()
    with pytest.raises(LowRankError, match=r"executorch .* was built for another torch than"):
        runner._run_image([np.zeros((3, 4, 4), np.float32)])


def test_strips_with_a_residual_run_in_int8(tmp_path: Path, residual: nn.Module):
    pytest.importorskip("executorch")
    found = quantize(residual, torch.randn(4, 8, 6, 6), tmp_path / "net.pte", dynamic=())
    assert found.error is not None
    assert found.error < 0.1
