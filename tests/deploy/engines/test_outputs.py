"""The tensors of a result have names, whatever containers hold them."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.request import is_flat, named_tensors, plain_outputs


@dataclass
class Output:
    """What a network of Hugging Face gives: a dataclass whose fields may be None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Point(NamedTuple):
    x: Tensor
    y: Tensor


def test_the_tensors_of_a_result_have_names():
    one, two = torch.ones(1), torch.ones(2)
    assert list(named_tensors(one)) == ["output"]
    assert list(named_tensors([one, (two, None)])) == ["output_0", "output_1_0"]
    assert list(named_tensors({"maps": [one, two], 3: one})) == ["maps_0", "maps_1", "3"]
    assert list(named_tensors(Output(logits=one, hidden_states=(one, two)))) == [
        "logits", "hidden_states_0", "hidden_states_1"
    ]  # fmt: skip
    assert list(named_tensors(Point(one, two))) == ["x", "y"]
    assert isinstance(plain_outputs([one]), tuple)
    assert isinstance(plain_outputs(Point(one, two)), dict)
    for bad in ({"name": "net"}, None, {}, object()):
        with pytest.raises(LowRankError):
            named_tensors(bad)


def test_a_flat_result_needs_no_other_containers():
    one = torch.ones(1)
    assert is_flat((one, one))
    assert is_flat({"a": one})
    for other in ([one], {3: one}, {"a": [one]}, (one, None), Point(one, one), Output(logits=one)):
        assert not is_flat(other)
