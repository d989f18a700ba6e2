"""The steps of "Add an engine" in CONTRIBUTING.md, with an engine that keeps linear layers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowrank_cnn as lr
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Standardize
from lowrank_cnn.deploy import choose_engine
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Engine, Runner
from lowrank_cnn.deploy.engines.targets import ENGINES
from lowrank_cnn.train.trained import Trained

SIZE = (1, 4, 4)
USAGE = """import json, numpy; {made}
layers = json.load(open({file}))["layers"]
logits = images.reshape(1, -1)
for weight, bias in layers: logits = logits @ numpy.array(weight).T + bias"""


class LinearRunner(Runner):
    engine = "linear"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        content = json.loads(path.read_text())
        self._take(content["metadata"])
        self.layers = content["layers"]

    def _run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        x = arrays[0].reshape(len(arrays[0]), -1)
        for weight, bias in self.layers:
            x = x @ np.array(weight, "float32").T + np.array(bias, "float32")
        return [x]


def write_linear(path: Path, request: ExportRequest) -> None:
    layers = [part for part in request.network.modules() if isinstance(part, nn.Linear)]
    rows = [[part.weight.tolist(), part.bias.tolist()] for part in layers]
    path.write_text(json.dumps({"layers": rows, "metadata": request.metadata}))


@pytest.fixture(autouse=True)
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "linear", Engine(".linear", LinearRunner, write_linear, USAGE, package="numpy"))


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *more, nn.Linear(8, 2)).eval()


def test_a_file_is_written_compared_loaded_and_asked(tmp_path: Path):
    path, net = tmp_path / "net.linear", network()
    prepare = Standardize(torch.tensor([100.0]), torch.tensor([50.0]))
    trained = Trained(net, prepare, lr.get_recipe("digits", crop=None, pad=0), ("cat", "dog"), SIZE)
    written = lr.export(trained, path)
    assert written.error < 1e-5
    x = torch.randn(3, *SIZE)
    torch.testing.assert_close(lr.load(path)(x), net(x), rtol=1e-4, atol=1e-5)
    image = torch.randint(0, 256, SIZE, dtype=torch.uint8)
    assert [name for name, _ in lr.predict(lr.load(path), image)[0]] == [
        name for name, _ in lr.predict(trained, image)[0]
    ]


def test_a_network_that_the_engine_computes_wrongly_is_not_written(tmp_path: Path):
    with pytest.raises(LowRankError, match="output of the exported network differs from the original"):
        lr.export(network(nn.Tanh()), tmp_path / "net.linear", input_size=SIZE)
    assert not list(tmp_path.iterdir())


def test_the_commands_export_and_plan_take_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))\n"
    )
    # A process of its own would not know an engine that only this one has registered.
    here = choose_engine.time_files
    monkeypatch.setattr(choose_engine, "apart", lambda _file, _function, *asked: here(*asked))
    source = [f"{tmp_path}/model.py:make", "--input", "1x4x4"]
    for command in (
        ["export", *source, "--out", str(tmp_path / "phone"), "--to", "linear"],
        ["plan", *source, "--engine", "linear"],
    ):
        done = CliRunner().invoke(build(), command)
        assert done.exit_code == 0, done.output
        assert "linear" in done.output
    assert (tmp_path / "phone" / "make.linear.md").is_file()
