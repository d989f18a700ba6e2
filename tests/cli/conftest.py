"""Commands as a user types them, and two kinds of grey squares to train on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lowrank_cnn.cli.app import build
from lowrank_cnn.data import Data
from tests import support

SMALL_RUN = ("--width", "0.05", "--epochs", "1", "--batch-size", "16", "--set", "crop=14", "--device", "cpu")


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def invoke(*arguments: object, **options: bool) -> Result:
    return CliRunner().invoke(build(), [str(a) for a in arguments], **options)


@pytest.fixture
def lowrank() -> Callable[..., Result]:
    """Run a command: its output, its exit code, and the error that it ended with."""
    return invoke


@pytest.fixture
def output_of() -> Callable[..., str]:
    """Run a command and give what it prints to standard output; errors come through."""

    def run(*arguments: object) -> str:
        done = invoke(*arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def open_squares(*_: object, **__: object) -> Data:
    return support.squares(48, 10, 16)


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Data]:
    """The squares in place of whatever --data names."""
    monkeypatch.setattr("lowrank_cnn.data.open_data", open_squares)
    return open_squares


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of the user's own, that makes a network."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 8, 3))\nother = net().to\n"
    )
    return path


@pytest.fixture
def two_inputs(tmp_path: Path) -> Path:
    """A file with a network of two inputs, and functions that give these."""
    path = tmp_path / "two.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 4)\n"
        "    def forward(self, image, text):\n"
        "        return {'maps': self.norm(self.conv(image)), 'words': self.linear(text)}\n"
        "def net(): return Two()\n"
        "def inputs(): return torch.randn(2, 3, 8, 8), torch.randn(2, 5)\n"
        "def named(): return dict(zip(('image', 'text'), inputs()))\n"
    )
    return path


@pytest.fixture
def train_small(lowrank: Callable[..., Result]) -> Callable[..., Result]:
    """A run of a small network."""
    return partial(lowrank, "train", "nin-c3-lr", "--data", "squares", *SMALL_RUN)
