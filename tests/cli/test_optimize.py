"""The command optimize, as a user types it."""

import json

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.export import load


def test_optimize_writes_what_it_found(output_of, own, tmp_path):
    file = tmp_path / "fast.safetensors"
    text = output_of("optimize", f"{own}:net", "-o", file, "--input", "3x9x7", "--no-cache")
    assert max(map(len, text.splitlines())) <= 80
    assert "Fastest:" in text
    net = nn.Sequential(nn.Conv2d(3, 8, 3))
    found = load(file, into=net)
    assert found.report.choice in text
    assert found(torch.zeros(1, 3, 9, 7)).shape == (1, 8, 7, 5)
    with pytest.raises(LowRankError, match="--overwrite replaces it"):
        output_of("optimize", f"{own}:net", "-o", file, "--input", "3x9x7")


def test_a_network_of_several_inputs_is_optimised_on_an_example(output_of, two_inputs, tmp_path):
    file = tmp_path / "fast.onnx"
    options = ("--example", f"{two_inputs}:named", "--repeats", "3", "--budget", "5", "--no-cache", "--json")
    found = json.loads(output_of("optimize", f"{two_inputs}:net", "-o", file, *options))
    assert found["input"] == [[2, 3, 8, 8], [2, 5]]
    assert {time["runs"] for time in found["times"].values()} == {3}
    assert file.is_file()
