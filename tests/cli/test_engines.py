"""`lowrank plan --engine`: the engines that are there, the fastest, its file."""

from __future__ import annotations

import json

import pytest

from lowrank_cnn.cli.plan import _thin_rival
from lowrank_cnn.cli.source import Source
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model


def test_one_engine_is_timed_and_written(output_of, tmp_path):
    out = tmp_path / "files"
    text = output_of("plan", "nin-c3-lr", "--width", "0.1", "--engine", "torchscript", "--out", out, "--json")
    found = json.loads(text)
    assert found["fastest"].startswith("torchscript")
    assert set(found["times"]) <= {"torchscript, fp32", "torchscript, fp16"}
    assert found["rival"].keys() == found["times"].keys()
    assert "A thinner dense network of the same MACs takes" in found["verdict"]
    assert found["path"] == str(out / "net.ts")
    assert (out / "net.ts").is_file()


def test_the_thin_rival_of_a_narrow_network_has_its_macs():
    """Rounded to sixteens, the thin dense network has 0.83 of the dense MACs in place of 0.38."""
    size = (3, 32, 32)
    network = create_model("nin-c3-lr", width=0.1).eval()
    rival = _thin_rival(Source("nin-c3-lr", network, size), size)
    assert rival is not None
    assert count(rival, size).macs == pytest.approx(count(network, size).macs, rel=0.2)


ONE_INPUT = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU())

def inputs():
    return torch.randn(1, 2, 9)

def several():
    return torch.randn(2, 2, 9)
"""


def test_an_example_of_one_input_names_its_size(output_of, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(ONE_INPUT)
    named = ("plan", f"{own}:make", "--engine", "torchscript", "--json", "--example")
    assert json.loads(output_of(*named, f"{own}:inputs"))["input"] == [1, 2, 9]
    with pytest.raises(LowRankError, match="with a batch of 1, or leave --engine out"):
        output_of(*named, f"{own}:several")
