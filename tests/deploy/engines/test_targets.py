"""Every target is written, run and compared, in float32 and half precision; refusals are one sentence."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.engines import open_engine
from lowrank_cnn.deploy.engines.cards import write_card
from lowrank_cnn.deploy.engines.targets import TARGETS, target_of, usage
from lowrank_cnn.deploy.exporting import export, load
from lowrank_cnn.method.layers import build_conv
from lowrank_cnn.system.errors import LowRankError

SIZE = (3, 12, 12)


def tiny() -> nn.Module:
    """A low-rank layer, a pool, a dense layer and a classifier."""
    torch.manual_seed(0)
    layers = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", list(TARGETS))
def test_every_target_gives_what_the_network_gives(name: str, precision, tmp_path):
    target = TARGETS[name]
    if not target.installed:
        pytest.skip(f"{target.package} is not installed")
    net, path = tiny(), tmp_path / f"net{target.suffix}"
    written = export(net, path, input_size=SIZE, precision=precision)
    assert written.error < (1e-4 if precision == "fp32" else 0.05)
    images = torch.randn(3, *SIZE)
    given = open_engine(path, trusted=True, threads=1)(images.numpy())
    limit = 1e-4 if precision == "fp32" else 0.05
    np.testing.assert_allclose(given["output"], net(images).detach().numpy(), atol=limit, rtol=limit)
    card = write_card(path, "tiny", macs=1000, error=written.error, precision=precision).read_text()
    assert path.name in card
    assert len(usage(path).splitlines()) == 3


@pytest.mark.parametrize("name", ["openvino", "ncnn", "mnn", "executorch"])
def test_the_snippet_runs_as_it_is_printed(name: str, tmp_path, monkeypatch):
    target = TARGETS[name]
    if not target.installed:
        pytest.skip(f"{target.package} is not installed")
    net, path = tiny(), tmp_path / f"net{target.suffix}"
    export(net, path, input_size=SIZE)
    monkeypatch.chdir(tmp_path)
    images = torch.randn(1, *SIZE)
    scope = {"images": images.numpy(), "torch": torch, "np": np}
    exec(usage(path), scope)
    given = np.asarray(scope["logits"]).reshape(1, -1)
    np.testing.assert_allclose(given, net(images).detach().numpy(), atol=1e-2)


def test_a_file_of_an_engine_loads_as_a_module(tmp_path):
    pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    net = tiny()
    export(net, tmp_path / "net.param", input_size=SIZE)
    images = torch.randn(2, *SIZE)
    torch.testing.assert_close(load(tmp_path / "net.param")(images), net(images), atol=1e-4, rtol=1e-4)
    (tmp_path / "net.ncnn.bin").unlink()
    with pytest.raises(LowRankError, match=r"ncnn cannot read .*net.ncnn.bin"):
        open_engine(tmp_path / "net.param")


def test_targets_reached_through_others_say_how():
    with pytest.raises(LowRankError, match="trtexec"):
        target_of("tensorrt")
    with pytest.raises(LowRankError, match="coremltools"):
        target_of("coreml")
    with pytest.raises(LowRankError, match="did you mean openvino"):
        target_of("openvin")


def test_a_missing_engine_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(LowRankError, match=r"needs openvino: pip install 'lowrank-cnn\[engines\]'"):
        export(tiny(), tmp_path / "net.xml", input_size=SIZE)


@pytest.mark.parametrize("name", ["ncnn", "executorch"])
def test_engines_for_one_size_refuse_others(name: str, tmp_path):
    if importlib.util.find_spec(TARGETS[name].package) is None:
        pytest.skip(f"{name} is not installed")
    with pytest.raises(LowRankError, match="one size of image: leave height out"):
        export(tiny(), tmp_path / f"net{TARGETS[name].suffix}", input_size=SIZE, dynamic=("batch", "height"))


def test_half_precision_is_for_float32_networks(tmp_path):
    with pytest.raises(LowRankError, match="fp16 is for networks in float32"):
        export(tiny().half(), tmp_path / "net.onnx", input_size=SIZE, precision="fp16")
    with pytest.raises(LowRankError, match="fp32 or fp16, not 'int8'; lr.quantize"):
        export(tiny(), tmp_path / "net.onnx", input_size=SIZE, precision="int8")
