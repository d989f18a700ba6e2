"""Files for openvino hold what the network computes, in float32 and half precision."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.quantize import quantize


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    assert check_target("openvino", precision).is_file()


def test_a_missing_engine_is_named_with_its_install_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(LowRankError, match=r"needs openvino: pip install 'lowrank-cnn\[engines\]'"):
        export(tiny, tmp_path / "net.xml", input_size=(3, 12, 12))


def test_a_damaged_file_is_refused(tmp_path):
    pytest.importorskip("openvino")
    (tmp_path / "net.xml").write_text("<net")
    with pytest.raises(LowRankError, match="openvino cannot read"):
        open_engine(tmp_path / "net.xml")


def test_quantising_prints_nothing(tiny, tmp_path, capsys):
    pytest.importorskip("nncf")
    quantize(tiny, torch.randn(4, 3, 12, 12), tmp_path / "net.xml")
    assert capsys.readouterr().out == ""


def test_what_openvino_cannot_convert_gets_one_sentence(tmp_path):
    pytest.importorskip("openvino")
    net = nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")
    with pytest.raises(LowRankError, match=r"cannot be written for OpenVINO: it cannot convert .*Pad"):
        export(net, tmp_path / "net.xml", input_size=(4, 20, 22))
