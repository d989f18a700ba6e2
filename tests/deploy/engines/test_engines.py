"""Every row of the table of engines names a module with its runner and writer, and suffixes choose the row."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import (
    ENGINES,
    TRUSTED,
    Runner,
    check_trusted,
    engine_of,
    is_engine_file,
    open_engine,
)


@pytest.mark.parametrize("suffix", ENGINES)
def test_a_row_names_a_runner_and_a_writer(suffix: str):
    module, runner, writer = engine_of(Path(f"net{suffix}"))
    found = importlib.import_module(f"lowrank_cnn.deploy.engines.{module}")
    assert issubclass(getattr(found, runner), Runner)
    assert callable(getattr(found, writer))
    assert is_engine_file(f"some/net{suffix}")


def test_other_suffixes_and_missing_files_are_refused(tmp_path: Path):
    assert not is_engine_file("net.safetensors")
    with pytest.raises(LowRankError, match=r"no engine runs net\.zip"):
        open_engine("net.zip")
    with pytest.raises(LowRankError, match="there is no file"):
        open_engine(tmp_path / "net.onnx")


def test_only_files_that_can_run_code_need_trust(tmp_path: Path):
    for suffix in ENGINES:
        if suffix in TRUSTED:
            (tmp_path / f"net{suffix}").touch()
            with pytest.raises(LowRankError, match="trusted=True"):
                open_engine(tmp_path / f"net{suffix}")
        else:
            check_trusted(Path(f"net{suffix}"), trusted=False)
