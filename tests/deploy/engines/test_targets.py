"""Targets have names; torch's own and ONNX run as printed, and those reached through others say how."""

from __future__ import annotations

import pytest

from lowrank_cnn.deploy.engines import ENGINES
from lowrank_cnn.deploy.engines.targets import TARGETS, target_of, usage
from lowrank_cnn.system.errors import LowRankError


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["onnx", "pt2", "torchscript"])
def test_a_file_gives_what_the_network_gives(name: str, precision: str, check_target):
    assert len(usage(check_target(name, precision)).splitlines()) == 3


def test_every_target_is_a_row_of_the_engines():
    assert {target.suffix for target in TARGETS.values()} == set(ENGINES)


def test_targets_reached_through_others_say_how():
    with pytest.raises(LowRankError, match="trtexec"):
        target_of("tensorrt")
    with pytest.raises(LowRankError, match="coremltools"):
        target_of("coreml")
    with pytest.raises(LowRankError, match="onnx2tf"):
        target_of("litert")
    with pytest.raises(LowRankError, match="did you mean openvino"):
        target_of("openvin")
