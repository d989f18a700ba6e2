"""The tables of the documentation, on records that a test puts where they look."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table_records import ENVIRONMENT, ROOT, Put


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blocks", ROOT / "docs" / "blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def put(blocks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Write a record to where the tables look for them, which is empty at first."""
    monkeypatch.setattr("tables.form.RESULTS", tmp_path)

    def write(name: str, record: dict[str, Any]) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": ENVIRONMENT, **record}))

    return write
