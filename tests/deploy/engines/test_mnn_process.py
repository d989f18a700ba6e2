"""Where MNN ends its process without a word, the caller's goes on and gets a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.system.errors import LowRankError

pytest.importorskip("MNN")
NORMS = {
    "its converter lacks an operation": nn.BatchNorm2d(4, track_running_stats=False),
    "MNN cannot run what its converter wrote": nn.LocalResponseNorm(3),
}


@pytest.mark.parametrize("why", NORMS)
def test_what_ends_the_process_of_mnn_is_refused_in_a_sentence(why: str, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), NORMS[why]).eval()
    with pytest.raises(LowRankError, match=f"cannot be written for MNN: {why}"):
        export(net, tmp_path / "net.mnn", input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())
