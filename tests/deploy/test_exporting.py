import copy
import errno
import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.deploy.export import export, load, placing
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model
from lowrank_cnn.models.hub import from_pretrained
from tests.support import node_macs

SIZE = (3, 16, 16)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("nin-c3-lr", width=0.05, num_classes=7, norm="batch").eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(5, *SIZE, generator=torch.Generator().manual_seed(3))


def test_onnx_keeps_the_saving_and_the_outputs(tmp_path, network: nn.Module, images: torch.Tensor):
    written = export(network, tmp_path / "net.onnx", input_size=SIZE)
    assert written.error < 1e-4
    assert sum(node_macs(tmp_path / "net.onnx").values()) == count(network, SIZE).macs
    loaded = load(tmp_path / "net.onnx")
    for batch in (1, 5):
        torch.testing.assert_close(loaded(images[:batch]), network(images[:batch]), rtol=1e-4, atol=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    assert loaded.input_size == SIZE
    with pytest.raises(LowRankError, match="image of batchx3x16x16, not of 1x3x14x16"):
        loaded(torch.zeros(1, 3, 14, 16))


def test_functions_take_the_words_of_the_command(tmp_path, network: nn.Module, images: torch.Tensor):
    half = export(network, tmp_path / "phone", to="torchscript", precision="fp16", input_size=SIZE)
    assert half.path == str(tmp_path / "phone" / "net.ts")
    rounded = export(network, tmp_path / "small.onnx", precision="int8", calibrate=images, input_size=SIZE)
    assert rounded.layers == quantize(network, images, tmp_path / "same.onnx", input_size=SIZE).layers
    shared = export(network, tmp_path / "shared", to="pretrained")
    assert torch.equal(from_pretrained(shared.path)(images), network(images))


def test_every_scheme_keeps_its_saving_in_onnx(tmp_path, images: torch.Tensor):
    schemes = ["lr", "lr-join", "separable(m=4)", "mixture(kx1, 1xk, kxk, join)"]
    convs = [nn.Conv2d(3 if place == 0 else 8, 8, 3, padding=1) for place in range(len(schemes))]
    pools = [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity(), nn.Identity()]
    parts = [part for conv, pool in zip(convs, pools, strict=True) for part in (conv, nn.ReLU(), pool)]
    net = dense = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 16, 5)).eval()
    for place, scheme in enumerate(schemes):
        net = convert(net, scheme, where=str(3 * place), allow_costlier=True)
    assert export(net, tmp_path / "net.onnx", input_size=SIZE).error < 1e-4
    assert sum(node_macs(tmp_path / "net.onnx").values()) == count(net, SIZE).macs != count(dense, SIZE).macs
    torch.testing.assert_close(load(tmp_path / "net.onnx")(images), net(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_build_our_networks_again(tmp_path, network: nn.Module, images: torch.Tensor, dtype):
    for net in (network, convert(create_model("nin", width=0.05), "lr-join(m=4)", where="*conv2*")):
        net = copy.deepcopy(net).eval().to(dtype)
        export(net, tmp_path / "net.safetensors", overwrite=True)
        again = load(tmp_path / "net.safetensors")
        assert again.config == net.config
        assert not again.training
        assert {p.dtype for p in again.parameters()} == {dtype}
        torch.testing.assert_close(again(images.to(dtype)), net(images.to(dtype)), rtol=0, atol=0)
    with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        stored = json.loads(file.metadata()["lowrank_cnn"])
    assert stored["conversion"]["changed"][0]["name"] == "features.conv2_1"


def test_a_merged_or_planned_network_exports_as_a_graph_but_not_as_weights(tmp_path, network: nn.Module, images):
    own = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    planned = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval()
    note(planned, plan=SimpleNamespace(used=True))
    for changed in (merge(network), merge(own), planned):
        with pytest.raises(LowRankError, match="no longer is what its configuration builds"):
            export(changed, tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())
    export(merge(network), tmp_path / "net.pt2", input_size=SIZE)
    torch.testing.assert_close(load(tmp_path / "net.pt2", trusted=True)(images), network(images))
    export(merge(nn.Sequential(nn.Conv2d(3, 4, 3)).eval()), tmp_path / "nothing-merged.safetensors")


class Deciding(nn.Module):
    """A conv whose result depends on a decision about the size of the image."""

    def __init__(self, decide) -> None:
        super().__init__()
        self.conv, self.decide = nn.Conv2d(3, 4, 3), decide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * 2 if self.decide(x) else self.conv(x)


@pytest.mark.parametrize(
    ("suffix", "decide", "free"),
    [
        (".ts", lambda x: x.shape[0] > 16, "batch"),
        (".onnx", lambda x: x.shape[0] > 16, "batch"),
        (".pt2", lambda x: 2 * x.shape[0] + 1 > 200, "batch"),
        (".ts", lambda x: x.shape[-1] > 64, "width"),
        (".ts", lambda x: x.shape[-1] > 12, "width"),  # the example is larger
        (".ts", lambda x: x.shape[2] * x.shape[3] > 4096, "height and width"),
        (".onnx", lambda x: x.shape[2] * x.shape[3] > 4096, "height and width"),
    ],
)
def test_an_axis_whose_length_decides_the_path_is_not_free(tmp_path, suffix: str, decide, free: str):
    axes = ("batch", *(() if free == "batch" else ("height", "width")))
    with pytest.raises(LowRankError, match=f"{free} cannot be dynamic .* takes another path"):
        export(Deciding(decide), tmp_path / f"net{suffix}", input_size=SIZE, dynamic=axes)
    assert not list(tmp_path.iterdir())
    if suffix == ".ts":
        assert export(Deciding(decide), tmp_path / "net.ts", input_size=SIZE, dynamic=()).error == 0


@pytest.mark.parametrize("suffix", [".ts", ".pt2"])
def test_a_size_that_is_checked_is_free(tmp_path, suffix: str):
    def decide(x: torch.Tensor) -> bool:
        if x.shape[1] != 3 or x.shape[-1] > 200:
            raise ValueError("another image")
        return True

    net = nn.Sequential(Deciding(decide), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(2))
    assert (
        export(net, tmp_path / f"net{suffix}", input_size=SIZE, dynamic=("batch", "height", "width")).error < 1e-5
    )


def test_files_that_belong_together_are_never_mixed(tmp_path, monkeypatch):
    """Another network's .bin is not overwritten unasked; an interrupted move leaves no .xml with a new .bin."""

    def write(*, overwrite: bool) -> None:
        with placing(tmp_path / "net.xml", overwrite=overwrite) as aside:
            aside.write_text("new")
            aside.with_suffix(".bin").write_text("new")

    def found() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    (tmp_path / "net.bin").write_text("old")
    with pytest.raises(LowRankError, match=r"net\.bin exists"):
        write(overwrite=False)
    assert found() == {"net.bin": "old"}
    (tmp_path / "net.xml").write_text("old")
    move, moved = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        moved.append(target.suffix)
        if moved.count(".xml"):
            raise KeyboardInterrupt
        return move(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(overwrite=True)
    assert found() == {"net.bin": "new"}
    write(overwrite=True)
    assert found() == {"net.bin": "new", "net.xml": "new"}


def of_nan() -> nn.Module:
    net = nn.Conv2d(3, 4, 3)
    nn.init.constant_(net.weight, float("nan"))
    return net


@pytest.mark.parametrize(
    ("network", "file", "options", "says"),
    [
        (None, "net.bin", {}, "ends in one of .onnx, .xml"),
        (None, "folder", {}, "for a folder, give to='onnx' or another engine"),
        (None, "no/net.pt2", {}, "no directory"),
        (None, "/proc/net.safetensors", {}, "could not be written"),
        (None, "folder", {"to": "onx"}, "there is no target 'onx'; did you mean onnx"),
        (None, "net.onnx", {"precision": "int8"}, "int8 needs images .*: give calibrate"),
        (None, "net.onnx", {"precision": "int8", "opset": 18}, "int8 is written without opset: leave it out"),
        (None, "net.onnx", {"precision": "int8", "example_input": torch.ones(2, *SIZE)}, "without example_input"),
        (None, "net.pt2", {"dynamic": ("depht",)}, "not 'depht'"),
        (None, "net.pt2", {"dynamic": {"x": {0: "b"}}}, "inputs are image"),
        (None, "net.pt2", {"input_size": (4, 8, 8)}, "does not run on an input of 2x4x8x8"),
        (None, "net.pt2", {"example_input": "x"}, "must contain tensors"),
        ("net", "net.pt2", {}, "an nn.Module, not str"),
        (lambda: scripted(), "net.onnx", {}, "scripted"),
        (lambda: Named(), "net.pt2", {}, r"returns a str \(name\)"),
        (lambda: nn.Conv2d(3, 4, 3).double(), "net.onnx", {}, "model.float"),
        (of_nan, "net.onnx", {}, "NaN or infinite"),
    ],
)
def test_an_export_that_cannot_be_is_refused_in_a_sentence(network, file: str, options: Any, says: str, tmp_path):
    net = nn.Conv2d(3, 4, 3) if network is None else network() if callable(network) else network
    size = {} if {"example_input", "input_size"} & options.keys() else {"input_size": SIZE}
    with pytest.raises(LowRankError, match=says):
        export(net, tmp_path / file, **size, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "file", "says"),
    [
        (lambda path: path, "net.pt2", "no file"),
        (lambda path: path.parent, "net.pt2", "holds no checkpoint"),
        (lambda path: bad(path), "net.safetensors", "not a safetensors file"),
        (lambda path: bad(path), "net.onnx", "onnxruntime cannot read"),
        (lambda path: bad(path), "net.zip", "ends in"),
        (lambda path: described(path, None), "net.safetensors", "not how to build"),
        (lambda path: described(path, "{"), "net.safetensors", "description is damaged"),
        (lambda path: described(path, '{"model": {"nam": 1}}'), "net.safetensors", "stored options of"),
        (lambda path: described(path, json.dumps(NO_SCHEME)), "net.safetensors", "a stored conversion lists"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_a_sentence(make, file: str, says: str, tmp_path):
    with pytest.raises(LowRankError, match=says):
        load(make(tmp_path / file))


def test_leftovers_of_killed_exports_are_cleared(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, alive = (tmp_path / f".tmp-export-{platform.node()}-{pid}-abc" for pid in (dead.pid, os.getpid()))
    for folder in (left, alive):
        folder.mkdir()
        (folder / "net.pt2").write_text("half of it")
    export(nn.Conv2d(3, 4, 3), tmp_path / "net.ts", input_size=SIZE)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, "net.ts"}


NO_SCHEME = {"model": {"name": "nin"}, "conversion": {"changed": [{"name": "features.conv1_1"}]}}


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"x": x, "name": "net"}


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))


def described(path, text: str | None):
    save_file({"weight": torch.ones(2)}, path, metadata=None if text is None else {"lowrank_cnn": text})
    return path


def bad(path):
    path.write_bytes(b"not a network")
    return path


@pytest.mark.parametrize("suffix", [".pt2", ".ts"])
def test_a_full_disk_leaves_the_file_that_was_there(network, tmp_path, monkeypatch, suffix: str):
    def full(self: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / f"net{suffix}"
    path.write_bytes(b"before")
    monkeypatch.setattr(Path, "write_bytes", full)  # torch, writing to a path itself, would end the process
    with pytest.raises(LowRankError, match=rf"the disk is full: .*net\{suffix} could not be written"):
        export(network, path, input_size=SIZE, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"
