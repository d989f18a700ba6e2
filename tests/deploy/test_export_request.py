import json
from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.export import request_for
from lowrank_cnn.models.network_file import Stored


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = self.conv(image)
        return {"image": maps, "scores": maps.mean((2, 3))}


def stored(input_size: tuple[int, ...] | None = (3, 8, 8)) -> Stored:
    return Stored(TwoHeads().train(), input_size)


def ports(request: Any, side: str) -> list[list[Any]]:
    return [[port["name"], port["shape"], port["dtype"]] for port in json.loads(request.metadata[side])]


def test_outputs_that_are_called_as_an_input_get_another_name_and_free_axes_have_no_length():
    given = stored()
    network, request = request_for(given)
    assert request.outputs == ("output_image", "scores")
    assert ports(request, "inputs") == [["image", ["batch", 3, 8, 8], "float32"]]
    assert ports(request, "outputs")[1] == ["scores", [None, None], "float32"]
    assert given.network.training
    assert not network.training


def test_with_every_axis_fixed_the_results_have_their_lengths():
    _, request = request_for(stored(), dynamic=())
    assert ports(request, "outputs") == [["output_image", [2, 4, 8, 8], "float32"], ["scores", [2, 4], "float32"]]


def test_the_images_have_the_type_of_the_weights():
    half = Stored(nn.Sequential(nn.Conv2d(3, 4, 3)).bfloat16(), (3, 8, 8))
    assert ports(request_for(half)[1], "inputs") == [["image", ["batch", 3, 8, 8], "bfloat16"]]


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        (stored(None), {}, "size of the images"),
        (stored(), {"names": {"outputs": ["a"]}}, r"gives 2 outputs \(image, scores\)"),
        (stored(), {"names": {"outputs": ["a", "a"]}}, "as many different output_names"),
        (stored(), {"preprocess": True}, "for a trained network"),
        (stored(), {"preprocess": "chw"}, "True, 'nchw' or 'nhwc', not 'chw'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(given: Stored, options: dict[str, Any], says: str):
    with pytest.raises(LowRankError, match=says):
        request_for(given, **options)
