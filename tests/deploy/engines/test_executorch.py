"""Files for executorch hold what the network computes, in float32 and half precision."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("executorch", precision).is_file()
