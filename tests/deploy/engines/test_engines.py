"""Every engine's files compute what the network does, run by themselves, and are refused in a sentence."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.executorch import ExecuTorchRunner
from lowrank_cnn.deploy.engines.runner import Port, Runner, parse_metadata, ports_from
from lowrank_cnn.deploy.engines.targets import (
    ENGINES,
    engine_of,
    open_engine,
    suffixes,
    target_of,
    usage,
    write_export_card,
)
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.parity import EngineModel
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.kernels.strips import available
from tests.deploy.engines.conftest import Calls

SIZE = (3, 12, 12)
HERE = str(Path(__file__).resolve().parents[3]).encode()
SLOW = pytest.mark.nightly
PAIRS = [(name, precision) for name in ENGINES for precision in ("fp32", "fp16")]
BY_NIGHT = [(name, "fp16") for name in ENGINES if name not in ("onnx", "litert", "ncnn")] + [
    ("executorch", "fp32")
]


def installed(name: str, precision: str = "fp32") -> str:
    """The suffix of an engine's files; skips a test of an engine that is not installed, or lacks the precision."""
    if not ENGINES[name].installed:
        pytest.skip(f"{ENGINES[name].package} is not installed")
    if ENGINES[name].strips and precision == "fp16" and not available(torch.float16):
        pytest.skip("compiled strips do not run in fp16 on this processor")
    return ENGINES[name].suffix


def run_snippet(path: Path, precision: str = "fp32", lines: int = 3) -> dict[str, Any]:
    text = usage(open_engine(path, trusted=True), path, precision=precision)
    assert len(text.splitlines()) in (lines, 4)  # MNN needs four
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*pair, marks=SLOW) if pair in BY_NIGHT else pair for pair in PAIRS],
)
def test_a_file_gives_what_the_network_gives(name: str, precision: str, tiny: nn.Module, tmp_path: Path):
    """As arrays, as a module, by the printed snippet; and a card says what it takes."""
    path, limit = tmp_path / f"net{installed(name, precision)}", 1e-4 if precision == "fp32" else 0.05
    how: Any = {"precision": precision, "strips": ENGINES[name].strips}
    written = export(tiny, path, input_size=SIZE, **how)
    assert written.error < limit
    images = torch.randn(3, *SIZE)
    expected = tiny(images).detach().numpy()
    runner = open_engine(path, trusted=True, threads=1)
    np.testing.assert_allclose(runner(images.numpy())["output"], expected, atol=limit, rtol=limit)
    assert runner.inputs[0].shape in [("batch", *SIZE), (None, *SIZE)]
    loaded = load(path, trusted=True)
    np.testing.assert_allclose(loaded(images).detach().numpy(), expected, atol=limit, rtol=limit)
    assert not any(part.training for part in loaded.modules())
    scope = run_snippet(path, precision)
    expected = tiny(torch.as_tensor(scope["images"])).detach().numpy()
    np.testing.assert_allclose(np.asarray(scope["logits"]).reshape(1, -1), expected, atol=limit)
    card = write_export_card(path, "tiny", macs=12_000, error=1e-6, precision=precision, accuracy="top-1 90%")
    for words in (f"tiny, {precision}, for", "12.0k", "1.0e-06", "top-1 90%", f"net{path.suffix}", "x3x12x12"):
        assert words in card.read_text()


def test_suffixes_choose_the_engine(tmp_path: Path):
    assert len(suffixes()) == 8
    assert ".safetensors" not in suffixes()
    assert engine_of(Path("net.onnx")) is ENGINES["onnx"]
    for call, says in [
        (lambda: open_engine("net.zip"), r"no engine runs net\.zip: its name must end in one of \.onnx"),
        (lambda: open_engine(tmp_path / "net.onnx"), "there is no file"),
        (lambda: target_of("tensorrt"), "trtexec"),
        (lambda: target_of("coreml"), "coremltools"),
        (lambda: target_of("openvin"), "did you mean openvino"),
    ]:
        with pytest.raises(LowRankError, match=says):
            call()


@pytest.mark.parametrize("name", [name for name in ENGINES if not ENGINES[name].strips])
def test_a_damaged_file_is_one_sentence(name: str, tmp_path: Path):
    path = tmp_path / f"net{installed(name)}"
    path.write_bytes(b"\x10\0\0\0TFL3" + bytes(20))
    if ENGINES[name].trusted:
        with pytest.raises(LowRankError, match="trusted=True"):
            open_engine(path)
    with pytest.raises(LowRankError, match=r"cannot read|is not a|net\.\w+\.json, which names the inputs"):
        open_engine(path, trusted=True)


def test_a_name_that_is_no_text_is_one_sentence(tmp_path: Path):
    path = tmp_path / f"net{installed('onnx')}"
    export(nn.Conv2d(3, 4, 3), path, input_size=SIZE)
    name = open_engine(path).inputs[0].name
    path.write_bytes(path.read_bytes().replace(name.encode(), b"\xb1" * len(name)))
    with pytest.raises(LowRankError, match="onnxruntime cannot read"):
        open_engine(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_of_others_is_refused(tmp_path: Path):
    torch.jit.trace(nn.Conv2d(3, 4, 3), torch.zeros(1, *SIZE)).save(str(tmp_path / "plain.ts"))
    with pytest.raises(LowRankError, match="does not name its inputs"):
        open_engine(tmp_path / "plain.ts", trusted=True)


def test_a_program_of_others_runs_by_the_names_in_it(tmp_path: Path):
    program = torch.export.export(nn.Linear(3, 2), (torch.zeros(4, 3),))
    torch.export.save(program, tmp_path / "plain.pt2")
    (output,) = open_engine(tmp_path / "plain.pt2", trusted=True)._run([np.zeros((4, 3), "float32")])
    assert output.shape == (4, 2)


@pytest.mark.parametrize("name", ["ncnn", "litert", "executorch"])
def test_files_for_one_image_have_one_size(name: str, tiny: nn.Module, tmp_path: Path):
    with pytest.raises(LowRankError, match="fixed image size: leave height out"):
        export(tiny, tmp_path / f"net{installed(name)}", input_size=SIZE, dynamic=("batch", "height"))


def test_a_file_of_ncnn_needs_its_weights(tiny: nn.Module, tmp_path: Path):
    path = tmp_path / f"net{installed('ncnn')}"
    export(tiny, path, input_size=SIZE)
    (tmp_path / "net.ncnn.bin").unlink()
    with pytest.raises(LowRankError, match=r"ncnn cannot read .*net\.ncnn\.bin"):
        open_engine(path)


def test_a_missing_engine_is_named_with_its_install_line(tiny: nn.Module, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(LowRankError, match=r"needs openvino: pip install '\.\[engines\]'"):
        export(tiny, tmp_path / "net.xml", input_size=SIZE)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize(
    ("name", "network", "says"),
    [
        ("ncnn", Calls(lambda x: x[:, :, ::2, ::2]), "ncnn"),
        ("mnn", nn.BatchNorm2d(3, track_running_stats=False), "for MNN: its converter lacks an operation"),
        ("mnn", nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(3)), "MNN cannot run what its converter"),
        ("openvino", nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), "OpenVINO: it cannot convert .*Pad"),
        ("litert", nn.Sequential(nn.Conv2d(3, 4, 1), nn.PixelUnshuffle(2), nn.Softplus()), "is not supported"),
        ("litert", nn.Conv2d(3, 4, 1).double(), r"take float32 or uint8, not torch\.float64"),
        ("torchscript", Calls(Doubled.apply), r"TorchScript cannot hold the network: .*'Doubled'"),
        ("onnx", Calls(lambda x: torch.linalg.svd(x)[1]), r"Calls cannot be written as ONNX: No ONNX .*svd"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(name: str, network: nn.Module, says: str, tmp_path: Path):
    with pytest.raises(LowRankError, match=says):
        export(network.eval(), tmp_path / f"net{installed(name)}", input_size=(3, 20, 22))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("padding", [0, 1])
def test_average_pools_that_reach_over_the_border_in_ncnn(padding: int, tmp_path: Path):
    pool = nn.AvgPool2d(3, 2, padding, ceil_mode=True)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pool).eval()
    assert export(network, tmp_path / f"net{installed('ncnn')}", input_size=(3, 11, 12)).error < 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"), [("mnn", torch.uint8), ("mnn", torch.int64), ("litert", torch.uint8), ("onnx", torch.uint8)]
)
def test_files_take_pixels(name: str, dtype: torch.dtype, tmp_path: Path):
    pixels = torch.randint(0, 256, (1, 3, 8, 8), dtype=dtype)
    net = Calls(lambda x: x.float().mean((2, 3)) / 255).eval()
    path = tmp_path / f"net{installed(name)}"
    export(net, path, example_input=pixels)
    torch.testing.assert_close(load(path)(pixels), net(pixels), rtol=1e-4, atol=1e-4)
    if name == "onnx":
        assert run_snippet(path)["images"].dtype == "uint8"


class Two(nn.Module):
    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"masked": image * mask, "image": image}


@pytest.mark.parametrize(("name", "named"), [("pt2", True), ("onnx", True), ("pt2", False), ("litert", True)])
def test_several_inputs_and_outputs_go_by_name(name: str, named: bool, tmp_path: Path):
    example = {"image": torch.rand(2, 3, 4, 4), "mask": torch.rand(2, 1, 4, 4)}
    path = tmp_path / f"net{installed(name)}"
    export(Two(), path, example_input=example if named else tuple(example.values()))
    found = open_engine(path, trusted=True)({name: tensor.numpy() for name, tensor in example.items()})
    torch.testing.assert_close(torch.from_numpy(found["masked"]), example["image"] * example["mask"])
    torch.testing.assert_close(torch.from_numpy(found["output_image"]), example["image"])
    scope = run_snippet(path)
    logits = scope["logits"]["masked"] if name == "pt2" else scope["logits"]
    expected = torch.as_tensor(scope["input0"]) * torch.as_tensor(scope["input1"])
    torch.testing.assert_close(torch.as_tensor(logits), expected)


@pytest.mark.parametrize("name", ["pt2", "litert"])
def test_weights_and_images_in_channels_last(name: str, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net = net.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    images = torch.randn(1, 1, 8, 8).to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "No complete tensor")
        assert export(net, tmp_path / f"net{installed(name)}", example_input=images, dynamic=()).error < 1e-5


def test_a_program_keeps_no_paths_and_no_example_and_cannot_train(tmp_path: Path):
    net, path = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), tmp_path / "net.pt2"
    export(net, path, example_input=torch.full((2, 3, 8, 8), 0.123))
    with ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    example = torch.full((16,), 0.123).numpy().tobytes()
    assert not [
        name for name, part in parts.items() if HERE in part or b"site-packages" in part or example in part
    ]
    loaded = load(path, trusted=True)
    assert loaded.eval() is loaded
    with pytest.raises(LowRankError, match="cannot be trained"):
        loaded.train()
    with pytest.raises(LowRankError, match="image of batchx3x8x8, not of 2x3x9x9"):
        open_engine(path, trusted=True)(np.zeros((2, 3, 9, 9), "float32"))


def test_batch_norms_are_folded_and_maps_are_transposed_once_in_litert(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    nn.init.normal_(net[1].running_mean)  # type: ignore[arg-type]
    export(net.eval(), tmp_path / f"net{installed('litert')}", input_size=(3, 8, 8))
    runner = open_engine(tmp_path / "net.tflite")
    kinds = [each["op_name"] for each in runner.interpreter._get_ops_details()]  # type: ignore[attr-defined]
    assert kinds[:3] == ["TRANSPOSE", "CONV_2D", "MEAN"]
    assert not (tmp_path / "net.tflite.json").exists()  # the file itself names its inputs


@pytest.mark.nightly
def test_quantising_takes_residuals(residual: nn.Module, tmp_path):
    installed("executorch")
    assert quantize(residual, torch.randn(4, 8, 6, 6), tmp_path / "net.pte", dynamic=()).error < 0.1


def test_a_runtime_built_for_another_torch_is_named():
    class Mismatched:
        def execute(self, _: object) -> None:
            raise RuntimeError("tensor does not have a device\nException raised from device_default")

    installed("executorch")
    runner = object.__new__(ExecuTorchRunner)
    runner.method = Mismatched()
    with pytest.raises(LowRankError, match=r"executorch .* was built for another torch than"):
        runner._run([np.zeros((1, 3, 4, 4), np.float32)])


# What every runner checks, and a file as a module.


class Doubling(Runner):
    """An engine that doubles its inputs, and counts its runs."""

    engine = "test"

    def __init__(self, *ports: Port, outputs: int = 1, whole: bool | None = False) -> None:
        self.inputs = ports
        self.outputs = tuple(Port(f"out{n}", ()) for n in range(outputs))
        self.metadata, self.runs, self.whole = {}, 0, whole

    def _run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.runs += 1 if self.whole is not None else 1 // 0
        return [2 * arrays[0].sum(0) if self.whole else 2 * arrays[0] for _ in self.outputs]


def images(batch: int) -> Tensor:
    return torch.arange(6.0 * batch).view(batch, 2, 3)


def of_batch(batch: int | str, **options: Any) -> Doubling:
    return Doubling(Port("image", (batch, 2, 3)), **options)


@pytest.mark.parametrize(("batch", "given", "runs"), [(2, 5, 3), (1, 3, 3), (4, 4, 1), ("batch", 5, 1)])
def test_a_fixed_batch_runs_as_often_as_it_takes(batch: int | str, given: int, runs: int):
    runner = of_batch(batch)
    assert torch.equal(EngineModel(runner)(images(given)), 2 * images(given))
    assert runner.runs == runs


def test_several_outputs_have_names():
    assert list(EngineModel(of_batch("batch", outputs=2))(image=images(2))) == ["out0", "out1"]


A, B = np.zeros((3, 2), "float32"), np.zeros(1, "float32")
BOTH = Doubling(Port("a", ("batch", 2)), Port("b", (1,), "bfloat16"))
PIXELS = torch.tensor([[[[0.0, 255.0], [17.4, 100.0]]]])


def prepares(layout: str = "nchw") -> EngineModel:
    size = (2, 2, 1) if layout == "nhwc" else (1, 2, 2)
    runner = Doubling(Port("image", ("batch", *size), "uint8"))
    runner.metadata = {"pixels": f'"{layout}"'}
    return EngineModel(runner)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: BOTH({"a": A}), "takes a, b, not a"),
        (lambda: BOTH({"a": A.T, "b": B}), "a of batchx2, not of 2x3"),
        (lambda: BOTH({"a": A.astype("float64"), "b": B}), "a in float32, not in float64"),
        (lambda: EngineModel(of_batch(4, whole=True))(images(3)), "4 images at a time, not 3"),
        (lambda: EngineModel(of_batch("batch"))(other=images(2)), "takes image, not other"),
        (lambda: EngineModel(Doubling())(), "takes no input"),
        (lambda: EngineModel(Doubling(Port("text", ("batch",), "string"))), "text in string"),
        (lambda: EngineModel(of_batch(2**30))(images(1)), "image of 1073741824x2x3, not of 1x2x3"),
        (lambda: EngineModel(of_batch(1000))(torch.zeros(1, 2, 4)), "image of 1000x2x3, not images of 2x4"),
        (lambda: EngineModel(of_batch("batch", whole=None))(images(1)), "test cannot run this file: .*by zero"),
        *((lambda wrong=wrong: prepares()(wrong), "pixel values of 0 to 255") for wrong in (PIXELS - 120,
          PIXELS * 2, PIXELS / 255, PIXELS * float("nan"))),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(call: Any, says: str):
    with pytest.raises(LowRankError, match=says):
        call()


def test_pixels_are_taken_as_numbers_too():
    assert prepares("nhwc")(PIXELS).tolist() == [[[[0], [254]], [[34], [200]]]]


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, b"\xff", "3", '[{"name": "a"}]', '{"a": 1}'])
def test_damaged_metadata_counts_as_none(text: str | bytes):
    assert parse_metadata(text) in ({}, {"a": "1"})
    assert ports_from(text) == ()  # type: ignore[arg-type]
