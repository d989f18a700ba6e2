"""Files for mnn hold what the network computes, in float32 and half precision."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("mnn", precision).is_file()


def test_a_file_needs_the_names_beside_it(check_target):
    path = check_target("mnn", "fp32")
    path.with_name("net.mnn.json").unlink()
    with pytest.raises(LowRankError, match=r"net\.mnn\.json"):
        open_engine(path)
