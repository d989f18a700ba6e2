"""Files for LiteRT hold what the network computes, in float32 and half precision, and run by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.targets import open_engine, usage
from lowrank_cnn.deploy.export import export
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models import create_model

pytest.importorskip("onnx_tflite")

LOW_RANK = [("nin-c3-lr", (3, 32, 32)), ("resnet18-lr", (3, 40, 40)), ("vgg11-gmp-lr-join", (3, 32, 32))]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_gives_what_the_network_gives(precision: str, check_target):
    path = check_target("litert", precision)
    assert open_engine(path).metadata["precision"] == precision
    assert (b"reduced_precision_support" in path.read_bytes()) == (precision == "fp16")
    assert not path.with_name("net.tflite.json").exists()  # the file itself names its inputs


@pytest.mark.parametrize(("name", "size"), LOW_RANK)
def test_low_rank_networks_run_as_they_do_in_float64(name: str, size: tuple[int, ...], tmp_path: Path):
    torch.manual_seed(0)
    net = create_model(name, width=0.125, num_classes=7).eval()
    export(net, tmp_path / "net.tflite", input_size=size)
    images = torch.randn(1, *size)
    given = open_engine(tmp_path / "net.tflite", threads=1)(images.numpy())["output"]
    with torch.no_grad():
        expected = net.double()(images.double()).numpy()
    assert np.abs(given - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_converted_network_of_another_library(tmp_path: Path):
    provider = pytest.importorskip("pytorchcv.model_provider")
    net = convert(provider.get_model("nin_cifar10").eval(), "lr")
    written = export(net, tmp_path / "net.tflite", input_size=(3, 32, 32), dynamic=())
    assert written.error is not None
    assert written.error < 1e-5


def test_batch_norms_are_folded_and_maps_are_transposed_once(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    nn.init.normal_(net[1].running_mean)  # type: ignore[arg-type]
    export(net.eval(), tmp_path / "net.tflite", input_size=(3, 8, 8))
    runner = open_engine(tmp_path / "net.tflite")
    kinds = [each["op_name"] for each in runner.interpreter._get_ops_details()]  # type: ignore[attr-defined]
    assert kinds[:3] == ["TRANSPOSE", "CONV_2D", "MEAN"]


def test_networks_and_images_in_channels_last(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net = net.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    images = torch.randn(1, 1, 8, 8).to(memory_format=torch.channels_last)
    written = export(net, tmp_path / "net.tflite", example_input=images, dynamic=())
    assert written.error is not None
    assert written.error < 1e-5


def test_several_inputs_and_outputs_go_by_name(tmp_path: Path, monkeypatch):
    class Two(nn.Module):
        def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"masked": image * mask, "image": image}

    example = {"image": torch.rand(2, 3, 4, 4), "mask": torch.rand(2, 1, 4, 4)}
    export(Two(), tmp_path / "net.tflite", example_input=example)
    runner = open_engine(tmp_path / "net.tflite")
    found = runner({name: tensor.numpy() for name, tensor in example.items()})
    torch.testing.assert_close(torch.from_numpy(found["masked"]), example["image"] * example["mask"])
    torch.testing.assert_close(torch.from_numpy(found["output_image"]), example["image"])
    monkeypatch.chdir(tmp_path)
    scope: dict[str, np.ndarray] = {}
    exec(usage(runner, "net.tflite"), scope)
    np.testing.assert_allclose(scope["logits"], scope["input0"] * scope["input1"], rtol=1e-6)


def test_the_printed_lines_run_in_a_process_of_their_own(tiny: nn.Module, tmp_path: Path):
    export(tiny, tmp_path / "net.tflite", input_size=(3, 12, 12))
    lines = usage(open_engine(tmp_path / "net.tflite"), "net.tflite")
    assert len(lines.splitlines()) == 3
    command = [sys.executable, "-c", f"{lines}\nprint(logits.shape)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "(1, 4)", done.stderr


def test_bytes_go_in_where_the_network_prepares_its_images(tmp_path: Path):
    class Scaled(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.permute(0, 3, 1, 2).float() / 255

    pixels = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    export(Scaled(), tmp_path / "net.tflite", example_input=pixels)
    given = open_engine(tmp_path / "net.tflite")(pixels.numpy())["output"]
    np.testing.assert_allclose(given, Scaled()(pixels).numpy(), rtol=1e-6)


def test_what_cannot_be_written_is_named(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.PixelUnshuffle(2), nn.Softplus()).eval()
    with pytest.raises(LowRankError, match=r"for LiteRT: \w+ \(\d/.*\) has no translation here; take another"):
        export(net, tmp_path / "net.tflite", input_size=(3, 8, 8))
    with pytest.raises(LowRankError, match=r"take float32 or uint8, not torch\.float64"):
        export(nn.Conv2d(3, 4, 1).double(), tmp_path / "net.tflite", input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_one_sentence(tmp_path: Path):
    (tmp_path / "net.tflite").write_bytes(b"\x10\0\0\0TFL3" + bytes(20))
    with pytest.raises(LowRankError, match="litert cannot read"):
        open_engine(tmp_path / "net.tflite")
