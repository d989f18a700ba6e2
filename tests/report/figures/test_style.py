from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.report.style import FORMATS, check_format


def test_other_formats_are_refused():
    assert [check_format(Path(f"a.{kind.upper()}")) for kind in FORMATS] == list(FORMATS)
    with pytest.raises(LowRankError, match="svg, pdf, png"):
        check_format(Path("a.gif"))
