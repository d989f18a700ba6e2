"""`lowrank export` to engines: a directory by --to, half precision, int8 with accuracy, and sentences."""

from __future__ import annotations

import json

import pytest
import torch

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.kernels.strips import available

SMALL = ("--width", "0.1", "--input", "3x30x30")


def test_a_target_gets_a_directory_with_a_card(output_of, tmp_path):
    text = output_of(
        "export", "nin-c3-lr", "-o", tmp_path / "phone", "--to", "torchscript", "--precision", "fp16", *SMALL
    )
    assert sorted(file.name for file in (tmp_path / "phone").iterdir()) == ["nin-c3-lr.ts", "nin-c3-lr.ts.md"]
    scope: dict[str, object] = {}
    exec("\n".join(line[3:] for line in text.splitlines() if line.startswith("   ")), scope)  # as it is printed
    assert tuple(scope["logits"].shape) == (1, 10)
    assert "fp16" in (tmp_path / "phone" / "nin-c3-lr.ts.md").read_text()


def test_a_folder_for_from_pretrained_is_a_target(output_of, tmp_path):
    output_of("export", "nin-c3-lr", tmp_path / "shared", "--to", "pretrained", "--pretrained", "cifar10")
    assert lr.notes(lr.from_pretrained(tmp_path / "shared")).training_card is not None


@pytest.mark.skipif(not available(torch.float32), reason="lowrank-strips is not built: `make strips`")
def test_strips_are_a_target_and_the_snippet_registers_their_library(output_of, tmp_path):
    text = output_of("export", "nin-c3-lr", "-o", tmp_path / "server", "--to", "onnx-strips", *SMALL)
    assert "register_custom_ops_library" in text
    assert "strips" in open_engine(tmp_path / "server" / "nin-c3-lr.onnx").metadata


def test_int8_prints_the_accuracy_before_and_after(output_of, tmp_path, monkeypatch):
    few = open_data("digits", limit=60, progress=False)
    monkeypatch.setattr("lowrank_cnn.deploy.quantize.open_data", lambda *_, **__: few)
    run = tmp_path / "run"
    small = ("--limit", "60", "--batch-size", "16", "--width", "0.05", "--epochs", "1", "--device", "cpu")
    output_of("train", "nin-c3-lr", "--data", "digits", "--recipe", "digits", *small, "--out", run)
    text = output_of(
        "export", run, "-o", tmp_path / "net.int8.onnx", "--precision", "int8", "--calibrate", "digits"
    )
    assert "in int8, on 60 test images" in text
    assert "Layers that stay in float:" in text
    assert (tmp_path / "net.int8.onnx.md").is_file()


def test_export_writes_merges_and_reports(output_of, tmp_path):
    path = tmp_path / "net.pt2"
    how = ("export", "nin", path, "--scheme", "lr", "--norm", "batch", "--merge", "--width", "0.1")
    printed = json.loads(output_of(*how, "--json"))
    assert printed["path"] == str(path)
    assert printed["error"] < 1e-4
    with pytest.raises(LowRankError, match="exists"):
        output_of(*how)
    text = output_of(*how, "--overwrite")
    assert "kB" in text
    assert "8 layers merged" in text


def test_a_network_of_ones_own_is_calibrated_on_images_of_a_function(output_of, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))\n"
        "def images(): return torch.randn(8, 3, 8, 8)\n"
        "def words(): return 'no images'\n"
    )
    how = (f"{own}:net", "-o", tmp_path / "net.onnx", "--precision", "int8", "--input", "3x8x8", "--calibrate")
    with pytest.raises(LowRankError, match="images as a tensor"):
        output_of("export", *how, f"{own}:words")
    text = output_of("export", *how, f"{own}:images")
    assert "accuracy not measured" in text
    assert "Layers that stay in float:" in text
    assert open_engine(tmp_path / "net.onnx").metadata["precision"] == "int8"


@pytest.mark.parametrize("example", ["inputs", "named"])
def test_networks_of_several_inputs_are_exported_on_an_example(output_of, two_inputs, tmp_path, example):
    file, given = tmp_path / "net.onnx", f"{two_inputs}:{example}"
    names = ("--input-names", "a,b", "--output-names", "c,d")
    merged = ("--merge",) if example == "inputs" else ()
    found = json.loads(
        output_of("export", f"{two_inputs}:net", file, "--example", given, *merged, *names, "--json")
    )
    assert found["error"] < 1e-4
    assert len(found["merging"]) == len(merged)
    counted = json.loads(output_of("count", f"{two_inputs}:net", "--example", given, "--json"))
    assert counted["macs"] == found["macs"]["before"] == 2 * (4 * 27 * 36 + 20)
    runner = open_engine(file)
    assert [port.name for port in runner.inputs] == ["a", "b"]
    assert [port.name for port in runner.outputs] == ["c", "d"]
