"""Benchmarks are modules of a package that is not installed; the tests run from the root of the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.data.conftest import photo, write_shards  # noqa: F401
