"""A .pt2 program keeps nothing of the machine that wrote it, nor of the example, and needs trust to be read."""

from __future__ import annotations

import warnings
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export

HERE = str(Path(__file__).resolve().parents[3]).encode()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), path, example_input=torch.full((2, 3, 8, 8), 0.123))
    return path


def test_a_program_keeps_no_paths_and_no_example(file: Path):
    with ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    assert not [name for name, content in parts.items() if HERE in content or b"site-packages" in content]
    example = torch.full((16,), 0.123).numpy().tobytes()
    assert not [name for name, content in parts.items() if example in content]


def test_channels_last_weights_are_written_without_a_warning(tmp_path: Path):
    layer = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "No complete tensor")
        export(layer, tmp_path / "net.pt2", input_size=(4, 8, 8))


def test_a_program_runs_by_names_if_trusted(file: Path):
    with pytest.raises(LowRankError, match="trusted=True"):
        open_engine(file)
    runner = open_engine(file, trusted=True)
    assert runner.inputs[0].shape == ("batch", 3, 8, 8)
    assert runner(torch.ones(3, 3, 8, 8).numpy())["output"].shape == (3, 4, 6, 6)
