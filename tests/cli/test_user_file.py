"""A file of the user's own runs as a script does, and its errors are one sentence."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from lowrank_cnn.cli.source import called, find_example, find_model
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes


def test_a_file_runs_as_a_script_with_its_neighbours_and_dataclasses(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_model.py").write_text("FILTERS = 8\n")
    (tmp_path / "model.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_model import FILTERS\n"
        "from torch import nn\n@dataclass\nclass Options:\n    filters: int = FILTERS\n"
        "def make():\n    return nn.Conv2d(3, Options().filters, 3)\n"
    )
    source = find_model(f"{tmp_path}/model.py:make")
    assert source.network.out_channels == 8
    assert notes(source.network).name == "model.py:make"
    assert isinstance(source.network, nn.Conv2d)


def test_errors_of_the_file_are_one_sentence(tmp_path):
    (tmp_path / "wrong.py").write_text("raise ValueError('first line\\nsecond line')\n")
    with pytest.raises(LowRankError, match=r"wrong.py does not run: ValueError: first line$"):
        find_example(f"{tmp_path}/wrong.py:inputs")
    with pytest.raises(LowRankError, match=r"as path.py:function, not 'inputs'"):
        find_example("inputs")
    assert called(lambda: 3, "it") == 3
