"""Rooms below `deploy` open graphs through the function that the package names."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from lowrank_cnn.core import graph_files


def test_the_opener_gets_the_path_and_whether_it_is_trusted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph_files, "_openers", [])
    graph_files.open_graphs_by(lambda path, *, trusted: nn.Linear(len(path.name), 1 + trusted))
    net = graph_files.open_graph(Path("runs/net.onnx"), trusted=True)
    assert net.weight.shape == (2, 8)


def test_the_package_opens_graphs_without_importing_what_runs_them_before(tmp_path: Path):
    code = (
        "import sys, lowrank_cnn.train.trained as trained\n"
        "assert 'lowrank_cnn.deploy' not in sys.modules\n"
        "open('net.onnx', 'wb').write(b'')\n"
        "try: trained.load_checkpoint('net.onnx')\n"
        "except trained.LowRankError as error: print(error)\n"
        "assert 'lowrank_cnn.deploy' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "net.onnx" in done.stdout
