"""Skip what an engine refuses because it was built for another torch than the one that is tested."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from lowrank_cnn.system.errors import LowRankError

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
PINNED = f"torch=={torch.__version__.partition('+')[0]}" in PINS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """With the pinned versions nothing is skipped: there the two belong together."""
    try:
        return (yield)
    except LowRankError as error:
        if PINNED or "built for another torch" not in str(error):
            raise
        pytest.skip(str(error))
