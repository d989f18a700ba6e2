"""What is timed: copies in torch and files, on random images or on the inputs of a caller."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.timing import FileRunner, TorchRunner
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.schemes import build_conv


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4)

    def forward(self, image: Tensor, word: Tensor) -> Tensor:
        return self.conv(image) + self.embed(word)[:, :, None, None]


INPUTS = (torch.randn(2, 3, 8, 8), torch.tensor([1, 4]))
MACS = 2 * 6 * 6 * 4 * 27


@pytest.mark.parametrize("kind", [TorchRunner, FileRunner.of])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_example_is_run_with_its_own_values_and_batch(kind, by_keyword: bool, tmp_path: Path):
    inputs = dict(zip(("image", "word"), INPUTS, strict=True)) if by_keyword else INPUTS
    runner = kind(TwoInputs(), inputs, 1, "cpu", tmp_path / "net")
    runner.run()
    assert runner.shapes == [(2, 3, 8, 8), (2,)]
    assert sum(runner.macs().values()) == MACS


def test_inputs_that_the_network_does_not_take_are_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(LowRankError, match="does not run on an input of 2x3x8x8 and 2x3"):
        TorchRunner(TwoInputs(), (INPUTS[0], torch.zeros(2, 3)), 1, "cpu", tmp_path)


def test_branches_of_training_are_folded_before_a_network_is_timed(tmp_path: Path):
    net = nn.Sequential(build_conv(3, 4, 3, "lr(branches)"), nn.ReLU())
    runner = TorchRunner(net, (3, 8, 8), 2, "cpu", tmp_path)
    assert set(runner.macs()) <= set(runner.layers(repeats=1)) == {"0", "1"}
    assert isinstance(net[0], BranchedConv2d)
