"""Networks and files are timed beside their MACs, on random images or on the inputs of a caller."""

import json

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.timing import TorchRunner, time_model
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.count import count
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model


def test_layers_and_total_stand_beside_their_macs():
    net = create_model("nin-c3-lr", width=0.1)
    timing = time_model(net, batch=2, repeats=3)
    assert timing.macs == 2 * count(net, net.input_size).macs == sum(layer.macs for layer in timing.layers)
    assert timing.total.ms > 0
    assert all(layer.ms >= 0 for layer in timing.layers)
    assert timing.twin.name == "nin"
    assert json.loads(json.dumps(timing.to_dict()))["input"] == [2, 3, 30, 30]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch must be .* at least 1"),
        ({"device": "cuda:7"} if not torch.cuda.is_available() else {"batch": 0}, "CUDA|at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        time_model(create_model("nin", width=0.05), **options)
    with pytest.raises(LowRankError, match="size of the images"):
        time_model(nn.Conv2d(3, 4, 3))


@pytest.mark.parametrize(
    ("net", "size"),
    [(nn.Conv1d(3, 8, 3), (3, 20)), (nn.Conv3d(3, 8, 3), (3, 6, 6, 6)), (nn.Linear(6, 8), (6,))],
    ids=["1-D", "3-D", "linear"],
)
def test_networks_of_other_inputs_than_images_are_timed(net: nn.Module, size: tuple[int, ...]):
    assert time_model(nn.Sequential(net), size, repeats=3).total.ms > 0


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4)

    def forward(self, image: Tensor, word: Tensor) -> Tensor:
        return self.conv(image) + self.embed(word)[:, :, None, None]


INPUTS = (torch.randn(2, 3, 8, 8), torch.tensor([1, 4]))
MACS = 2 * 6 * 6 * 4 * 27


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_network_of_several_inputs_is_timed_on_an_example_with_its_own_values_and_batch(by_keyword: bool):
    inputs = dict(zip(("image", "word"), INPUTS, strict=True)) if by_keyword else INPUTS
    timing = time_model(TwoInputs(), inputs, repeats=3)
    assert (timing.input, timing.more_inputs, timing.macs) == ((2, 3, 8, 8), ((2,),), MACS)
    with pytest.raises(LowRankError, match="a batch of its own"):
        time_model(TwoInputs(), inputs, batch=2)
    with pytest.raises(LowRankError, match="does not run on an input of 2x3x8x8 and 2x3"):
        time_model(TwoInputs(), (INPUTS[0], torch.zeros(2, 3)))


def test_branches_of_training_are_folded_before_a_network_is_timed():
    net = nn.Sequential(build_conv(3, 4, 3, "lr(branches)"), nn.ReLU())
    runner = TorchRunner(net, (3, 8, 8), 2, "cpu")
    assert set(runner.macs()) <= set(runner.layers(repeats=1)) == {"0", "1"}
    assert isinstance(net[0], BranchedConv2d)
