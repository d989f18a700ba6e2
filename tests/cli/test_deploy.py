"""The commands time, plan and export, as a user types them."""

import json
import os
import sys

import pytest
import torch
from PIL import Image

from lowrank_cnn.cli.app import run
from lowrank_cnn.cli.plan import limit_threads
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.export import load
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model

SMALL = ["--width", "0.1"]


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def test_time_prints_layers_correlation_and_the_twin(output_of):
    text = output_of("time", "nin-c3-lr", "--repeats", "3", *SMALL)
    assert fits(text)
    assert "features.conv1_1" in text
    assert "correlate with r" in text
    assert "Dense twin nin:" in text


def test_time_of_several_networks_correlates_them(output_of, own):
    names = ["nin", "nin-c3", "nin-c3-lr"]
    assert "Over these networks" in output_of("time", *names, "--repeats", "3", *SMALL)
    options = ["--scheme", "lr", "--input", "3x8x8", "--repeats", "3", "--threads", "1", "--json"]
    (timing,) = json.loads(output_of("time", f"{own}:net", *options))["timings"]
    assert timing["threads"] == 1
    assert timing["twin"]["macs"] == 3 * timing["macs"]


def test_plan_prints_every_way_and_the_choice(output_of):
    before = torch.get_num_threads()
    text = output_of("plan", "nin-c3-lr", "--no-cache", "--threads", "1", *SMALL)
    assert fits(text)
    assert "Fastest:" in text
    assert "of its time, for 0.380 of its MACs" in text
    assert f"lowrank plan nin-c3-lr {' '.join(SMALL)} --engine auto" in text
    printed = json.loads(output_of("plan", "nin-c3-lr", "--no-cache", "--json", *SMALL))
    assert printed["choice"] in printed["times"]
    assert torch.get_num_threads() == before


def test_plan_converts_first_where_a_scheme_is_given(output_of, own):
    options = ["--no-cache", "--threads", "1", "--json"]
    for model, more in ((f"{own}:net", ["--input", "3x8x8"]), ("nin", SMALL)):
        dense, low_rank = (
            json.loads(output_of("plan", model, *scheme, *more, *options)) for scheme in ([], ["--scheme", "lr"])
        )
        assert low_rank["macs"] < dense["macs"], model
        assert low_rank["twin"]["macs"] == dense["macs"]
        assert "twin" not in dense


VALUES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        return y if y.mean() > 0 else -y

def make():
    return Net()
"""


def test_plan_takes_a_network_whose_macs_cannot_be_counted(output_of, tmp_path):
    (tmp_path / "values.py").write_text(VALUES)
    options = ["--scheme", "lr", "--input", "3x8x8", "--no-cache", "--repeats", "3"]
    text = output_of("plan", f"{tmp_path}/values.py:make", *options)
    assert "of its time." in text
    assert f"lowrank plan {tmp_path}/values.py:make --input 3x8x8 --scheme lr --engine auto" in text
    assert json.loads(output_of("plan", f"{tmp_path}/values.py:make", *options, "--json"))["macs"] is None


def test_an_exported_network_remembers_what_images_it_takes(output_of, own, tmp_path):
    file = tmp_path / "own.safetensors"
    output_of("export", f"{own}:net", file, "--input", "3x9x7")
    (timing,) = json.loads(output_of("time", file, "--into", f"{own}:net", "--repeats", "3", "--json"))["timings"]
    assert timing["input"] == [1, 3, 9, 7]


def test_export_writes_and_reports(output_of, tmp_path):
    path = tmp_path / "net.pt2"
    printed = json.loads(
        output_of("export", "nin", path, "--scheme", "lr", "--norm", "batch", "--merge", "--json", *SMALL)
    )
    assert printed["path"] == str(path)
    assert printed["error"] < 1e-4
    with pytest.raises(LowRankError, match="exists"):
        output_of("export", "nin", path, *SMALL)
    assert "kB" in output_of("export", "nin", path, "--overwrite", *SMALL)


def test_weights_of_ones_own_network_are_counted_timed_and_planned(output_of, tmp_path):
    own, weights = tmp_path / "own.py", tmp_path / "own.safetensors"
    own.write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())\n")
    output_of("export", f"{own}:make", weights, "--scheme", "lr", "--input", "1x9x9")
    named = ("--into", f"{own}:make", "--input", "1x9x9", "--json")
    assert json.loads(output_of("count", weights, *named))["macs"] == 7 * 7 * 6 * 3
    (timing,) = json.loads(output_of("time", weights, "--repeats", "3", *named))["timings"]
    assert timing["macs"] == 7 * 7 * 6 * 3
    assert timing["twin"]["macs"] == 7 * 7 * 6 * 9
    planned = json.loads(output_of("plan", weights, "--no-cache", *named))
    assert planned["input"] == [1, 1, 9, 9]
    assert planned["twin"]["macs"] == 7 * 7 * 6 * 9


def test_export_writes_the_packages_own_weights(output_of, tmp_path):
    output_of("export", "nin-c3-lr", tmp_path / "net.safetensors", "--pretrained", "cifar10")
    ours, right = load(tmp_path / "net.safetensors"), create_model("nin-c3-lr", pretrained="cifar10")
    assert ours.state_dict().keys() == right.state_dict().keys()
    for name, value in right.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_an_exported_file_is_timed_asked_and_evaluated(output_of, tmp_path):
    image, file = tmp_path / "a.png", tmp_path / "net.onnx"
    Image.new("RGB", (32, 32), (200, 30, 30)).save(image)
    named = ("nin-c3-lr", "--pretrained", "cifar10")
    output_of("export", named[0], file, *named[1:], "--preprocess", "nhwc", "--dynamic", "none")
    (timing,) = json.loads(output_of("time", file, "--repeats", "3", "--json"))["timings"]
    assert timing["runtime"] == "onnxruntime"
    batch, height, width, _ = timing["input"]
    assert timing["macs"] == batch * count(create_model(named[0]), (3, height, width)).macs
    right, found = (json.loads(output_of("predict", *model, image, "--json")) for model in (named, (file,)))
    assert [c["class"] for c in found[0]["classes"]] == [c["class"] for c in right[0]["classes"]]
    text = output_of("time", file, "--repeats", "3")
    assert fits(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["time", "nin", "--repeats", "1"], "number of at least 3"),
        (["time", "nin", "--threads", "0"], "threads must be a number of at least 1"),
        (["plan", "nin", "--budget", "-1"], "budget, in seconds, must be a number above 0, not -1.0"),
        (["time", "nin", "--device", "gpu"], "no device 'gpu'"),
        (["plan", "nin", "--device", "gpu"], "no device 'gpu'"),
        (["plan", "nin", "--engine", "auto", "--batch", "4"], "one image at a time"),
        (["time", "nin", "--runtime", "onnx", "--device", "cuda"], "timed on the CPU"),
        (["export", "nin", "net.bin"], "ends in one of .onnx"),
        (["export", "nin", "net.onnx", "--dynamic", "batch,size"], "not 'size'"),
        (["time", "net.onnx"], "no file net.onnx"),
        (["time", "net.onnx", "--scheme", "lr"], "without --scheme"),
    ],
)
def test_bad_input_is_one_sentence(output_of, arguments: list[str], says: str):
    with pytest.raises(LowRankError, match=says):
        output_of(*arguments)


@pytest.mark.parametrize(("option", "most"), [("--threads", 1024), ("--batch", 10**6)])
def test_numbers_that_no_machine_has_are_refused(capfd: pytest.CaptureFixture, option: str, most: int):
    assert run(["plan", "nin", option, str(10**21)]) == 2
    assert f"less than or equal to {most}" in " ".join(capfd.readouterr().err.split())


def test_threads_are_limited_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert limit_threads(1) == 1
    assert os.environ["OMP_NUM_THREADS"] == "7", "torch is loaded already, and has its threads"
    monkeypatch.delitem(sys.modules, "torch")
    assert limit_threads(None) is None
    assert limit_threads(0) == 0
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert limit_threads(3) == 3
    assert os.environ["OMP_NUM_THREADS"] == "3"


TWO_INPUTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4)

    def forward(self, image, word):
        return self.conv(image) + self.embed(word)[:, :, None, None]

def make():
    return Net()

def series():
    return nn.Conv1d(2, 4, 3)

def half():
    return nn.Conv2d(3, 4, 3).half()

def inputs():
    return {"image": torch.randn(2, 3, 8, 8), "word": torch.tensor([1, 4])}
"""


def test_networks_of_other_inputs_are_timed_and_planned(output_of, tmp_path):
    own = tmp_path / "two.py"
    own.write_text(TWO_INPUTS)
    named = (f"{own}:make", "--example", f"{own}:inputs", "--scheme", "lr", "--repeats", "3")
    assert "2x3x8x8 and 2, torch" in output_of("time", *named)
    planned = json.loads(output_of("plan", *named, "--no-cache", "--json"))
    assert planned["input"] == [[2, 3, 8, 8], [2]]
    assert planned["twin"]["macs"] == 3 * planned["macs"] == 2 * 36 * 4 * 27
    (timing,) = json.loads(output_of("time", f"{own}:series", "--input", "2x9", "--json"))["timings"]
    assert (timing["input"], timing["macs"]) == ([1, 2, 9], 7 * 4 * 6)
    assert "Fastest" in output_of("plan", f"{own}:half", "--input", "3x8x8", "--no-cache", "--repeats", "3")
    for more, says in (
        (["--batch", "2"], "leave --batch out"),
        (["--input", "3x8x8"], "leave --input out"),
        (["--engine", "auto"], "let --example give one tensor"),
    ):
        with pytest.raises(LowRankError, match=says):
            output_of("plan", *named, *more)
