"""Targets have names; torch's own and ONNX run as printed, and those reached through others say how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import ENGINES, TARGETS, open_engine, target_of, usage
from lowrank_cnn.deploy.export import export


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["onnx", "pt2", "torchscript"])
def test_a_file_gives_what_the_network_gives(name: str, precision: str, check_target):
    path = check_target(name, precision)
    assert len(usage(open_engine(path, trusted=True), path, precision=precision).splitlines()) == 3


def test_every_target_is_a_row_of_the_engines():
    assert {target.suffix for target in TARGETS.values()} == set(ENGINES)


def test_targets_reached_through_others_say_how():
    with pytest.raises(LowRankError, match="trtexec"):
        target_of("tensorrt")
    with pytest.raises(LowRankError, match="coremltools"):
        target_of("coreml")
    with pytest.raises(LowRankError, match="did you mean openvino"):
        target_of("openvin")


@pytest.mark.parametrize(("suffix", "named"), [(".pt2", True), (".onnx", True), (".pt2", False), (".ts", False)])
def test_the_snippet_of_several_inputs_runs_as_it_is(suffix: str, named: bool, tmp_path: Path):
    class Two(nn.Module):
        def forward(self, image, mask):
            return image * mask

    example = {"image": torch.rand(2, 3, 4, 4), "mask": torch.rand(2, 1, 4, 4)}
    path = tmp_path / f"net{suffix}"
    export(Two(), path, example_input=example if named else tuple(example.values()))
    scope: dict[str, Any] = {}
    exec(usage(open_engine(path, trusted=True), path), scope)
    expected = torch.as_tensor(scope["input0"]) * torch.as_tensor(scope["input1"])
    torch.testing.assert_close(torch.as_tensor(scope["logits"]), expected)


def test_a_snippet_for_bytes_makes_bytes(tmp_path: Path):
    class Scaled(nn.Module):
        def forward(self, image):
            return image.float() / 255

    path = tmp_path / "net.onnx"
    export(Scaled(), path, example_input=torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    scope: dict[str, Any] = {}
    exec(usage(open_engine(path), path), scope)
    assert scope["images"].dtype == "uint8"
    assert scope["logits"].shape == (1, 3, 4, 4)
