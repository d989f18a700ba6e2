"""int8 files compute what the network computes, keep named layers in float, and refuse bad calibration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.progress import progress
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.deploy import quantize as quantizing
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.parity import DifferentOutputError
from lowrank_cnn.deploy.quantize import QuantizedLayer, quantize, sensitivities
from lowrank_cnn.method.schemes import build_conv

SIZE = (3, 12, 12)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    layers = [build_conv(3, 8, 3, "lr"), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".tflite", pytest.param(".pte", marks=pytest.mark.nightly)])
def test_int8_is_near_the_network(suffix: str, tmp_path, capsys):
    pytest.importorskip(
        {".onnx": "onnxruntime", ".xml": "nncf", ".tflite": "onnx_tflite", ".pte": "executorch"}[suffix]
    )
    net, images, said = tiny(), torch.randn(32, *SIZE), list[str]()
    with progress("int8", said.append):  # it can take minutes
        found = quantize(net, images, tmp_path / f"net{suffix}")
    assert [*dict.fromkeys(said)] == ["reading images", *(f"rounding {n}" for n in "037"), said[-1]]
    assert repr(found).endswith("B in int8; in float: none")
    assert capsys.readouterr().out == ""
    given = torch.from_numpy(open_engine(Path(found.path))(images.numpy())["output"])
    error = (given - net(images)).norm() / net(images).norm()
    assert 0 < error < 0.1
    assert found.in_float == ()
    assert [layer.name for layer in found.layers] == ["0", "3", "7"]


def test_a_layer_with_outliers_stays_in_float_unless_it_was_trained_in_int8(tmp_path):
    onnx = pytest.importorskip("onnx")
    net = tiny()
    with torch.no_grad():
        net[3].weight.mul_(10)
        net[3].weight[:, 0] = 1e5  # per-channel steps are set by one input channel, and the others vanish
        net[0].bias[0] = -1e4  # that channel is dead behind its ReLU
    images = torch.randn(32, *SIZE)
    # The other layers have learned to rely on its rounding: in float it would harm them.
    trained = {row.name: row for row in sensitivities(net, images, trained={"3": (0.0, 1.0)})}
    assert not trained["3"].in_float
    found = quantize(net, images, tmp_path / "net.onnx")
    assert "3" in found.in_float
    assert "7" not in found.in_float
    model = onnx.load(found.path)
    assert {row.key: row.value for row in model.metadata_props}["precision"] == "int8"
    nodes = model.graph.node
    made = {node.output[0]: node for node in nodes}
    weights = [made.get(node.input[1]) for node in nodes if node.op_type == "Conv"]
    kinds = [maker.op_type if maker else "float" for maker in weights]
    assert kinds == ["DequantizeLinear", "DequantizeLinear", "float"]


def test_where_no_try_is_within_the_loss_the_best_is_written():
    scores, written = iter([0.7, 0.6, 0.4]), []  # of files with 1, 2 and 3 layers in float

    def write(layers):
        written.append(sum(layer.in_float for layer in layers))
        if not written[-1]:  # a file with all layers in int8 computes something else
            raise DifferentOutputError("it differs.")
        return written[-1]

    layers = tuple(QuantizedLayer(str(place), place / 10, False) for place in range(5))
    assert quantizing._within_loss(write, layers, 0.3, 0.9, lambda: next(scores)) == 1
    assert written == [0, 1, 2, 3, 1]


def test_accuracy_is_measured_on_the_test_images(tmp_path):
    torch.manual_seed(0)
    data = open_data("digits", limit=600, progress=False)
    conv = [nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    network = nn.Sequential(*conv, nn.Linear(256, 10))
    learned = lr.fit(network, data, "digits", epochs=3, progress=False, device="cpu").result["top1"]
    assert learned > 0.4
    found = quantize(network, data, tmp_path / "net.onnx", images=64)
    assert found.before == pytest.approx(learned)
    assert found.images == len(data.test)
    assert abs(found.loss) < 5


@pytest.fixture(scope="module")
def learner() -> tuple[nn.Module, Data]:
    data = open_data("digits", limit=80, progress=False)
    network = nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    lr.fit(network, data, "digits", epochs=1, progress=False, device="cpu")
    return network, data


def test_layers_go_back_to_float_by_other_images_than_the_test_ones(learner, tmp_path, monkeypatch):
    network, data = learner
    judged = []

    def judge(_, images: Data, **options: object) -> SimpleNamespace:
        judged.append(images)
        return SimpleNamespace(top1=1.0 if len(judged) == 1 else -1 / len(judged))

    monkeypatch.setattr(quantizing, "evaluate", judge)
    found = quantize(network, data, tmp_path / "net.onnx", images=16)
    *deciding, before, after = judged
    assert len(found.in_float) == 2  # of two layers, each loses too much
    assert before is after
    assert all(
        images.test is not data.test and len(images.train) + len(images.test) == len(data.train)
        for images in deciding
    )


# A candidate is judged; the chosen file meets the test images.
@pytest.mark.parametrize(("before", "calls"), [(None, 2), (b"a file of the user's", 4)])
def test_an_interrupted_export_leaves_what_was_there(learner, tmp_path, monkeypatch, before, calls: int):
    path, scores = tmp_path / "net.onnx", iter([1.0] * (calls - 1))
    if before is not None:
        path.write_bytes(before)

    def judge(*_: object, **options: object) -> SimpleNamespace:
        if (score := next(scores, None)) is None:
            raise KeyboardInterrupt
        return SimpleNamespace(top1=score)

    monkeypatch.setattr(quantizing, "evaluate", judge)
    with pytest.raises(KeyboardInterrupt):
        quantize(*learner, path, images=16, overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == ({path.name: before} if before else {})


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.full((4, *SIZE), float("nan")), "NaN or infinite"),
        (torch.zeros(4, *SIZE), "all one value"),
        (torch.randn(4, 12), r"\[N, C, H, W\], not a tensor of shape"),
        (torch.randn(0, *SIZE), "not a tensor of shape"),
        ("digits", "give preprocessed images as a tensor"),
        ([(torch.randn(2, *SIZE), torch.zeros(2))], "networks of one input, not"),
    ],
)
def test_bad_calibration_is_refused(images, words: str, tmp_path):
    with pytest.raises(LowRankError, match=words):
        quantize(tiny(), images, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_other_files_and_layers_are_refused(tmp_path):
    with pytest.raises(LowRankError, match=r"int8 is written to \.onnx, \.xml, \.tflite, \.pte, not to \.param"):
        quantize(tiny(), torch.randn(4, *SIZE), tmp_path / "net.param")
    with pytest.raises(LowRankError, match="has none"):
        quantize(nn.Sequential(nn.ReLU()), torch.randn(4, *SIZE), tmp_path / "net.onnx")


def test_photographs_of_many_sizes_calibrate_at_the_size_of_training(tmp_path):
    image, photos = pytest.importorskip("PIL.Image"), tmp_path / "photos"
    pytest.importorskip("onnxruntime")
    for name, shade in (("dark", 20), ("bright", 200)):
        (photos / name).mkdir(parents=True)
        for number in range(10):
            image.new("RGB", (14 + number, 20), (shade + number, shade, 90)).save(photos / name / f"{number}.png")
    net = tiny()
    net[-1] = nn.Linear(8, 2)
    data = open_data(photos, image_size=12, val_split=0.3)
    lr.fit(net, data, lr.get_recipe("digits", batch_size=4, epochs=1, crop=None, pad=0), progress=False)
    found = lr.quantize(net, photos, tmp_path / "net.onnx")
    assert found.images == len(data.test) == 6  # those that training held out
