"""Files for one image run a batch image by image, and have one size of image."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import TARGETS
from lowrank_cnn.deploy.export import export


@pytest.mark.parametrize("name", ["ncnn", "litert", "executorch"])
def test_other_sizes_are_refused(name: str, tiny, tmp_path):
    if not TARGETS[name].installed:
        pytest.skip(f"{name} is not installed")
    with pytest.raises(LowRankError, match="one size of image: leave height out"):
        export(tiny, tmp_path / f"net{TARGETS[name].suffix}", input_size=(3, 12, 12), dynamic=("batch", "height"))
