import json

import torch

from lowrank_cnn import __version__
from lowrank_cnn.core.environment import commit, environment


def test_it_says_what_a_figure_was_measured_with():
    described = environment()
    assert described["torch"] == torch.__version__
    assert described["lowrank_cnn"] == __version__
    assert described["cpu"]
    assert json.loads(json.dumps(described)) == described


def test_a_tree_without_history_carries_its_commit_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWRANK_COMMIT", "abc123")
    monkeypatch.setattr(
        "lowrank_cnn.core.environment.__file__", str(tmp_path / "package" / "system" / "environment.py")
    )
    assert commit() == "abc123"
