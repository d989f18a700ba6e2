"""The commands time, plan and optimize, as a user types them."""

import json
import os
import sys

import pytest
import torch
from PIL import Image
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.cli.options import limit_threads
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.thin import thin_like
from tests.cli.conftest import fits
from tests.support import called_here

SMALL, QUICK = ["--width", "0.1"], ["--no-cache", "--repeats", "3"]
FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4)

    def forward(self, image, word):
        return self.conv(image) + self.embed(word)[:, :, None, None]

class Uncounted(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        return y if y.mean() > 0 else -y

def make(): return Net()
def dense(): return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())
def series(): return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU())
def half(): return nn.Conv2d(3, 4, 3).half()
def uncounted(): return nn.Sequential(nn.Conv2d(3, 8, 3), Uncounted(8, 8, 1))
def inputs(): return {"image": torch.randn(2, 3, 8, 8), "word": torch.tensor([1, 4])}
"""


@pytest.fixture
def file(tmp_path) -> str:
    """A file of networks and inputs, ready for the name of a function."""
    (tmp_path / "nets.py").write_text(FILE)
    return f"{tmp_path}/nets.py:"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are timed here; tests of the choice of an engine give each a process of its own."""
    monkeypatch.setattr("lowrank_cnn.deploy.choose_engine.apart", called_here)


def test_time_prints_layers_correlations_and_the_twin(output_of):
    text = output_of("time", "nin", "nin-c3", "nin-c3-lr", "--repeats", "3", *SMALL)
    assert fits(text)
    for words in ("features.conv1_1", "correlate with r", "Dense twin nin:", "Over these networks"):
        assert words in text


def test_plan_prints_every_way_and_the_choice(output_of):
    before = torch.get_num_threads()
    text = output_of("plan", "nin-c3-lr", "--no-cache", "--threads", "1", *SMALL)
    assert fits(text)
    assert "Fastest:" in text
    assert "of its time, for 0.380 of its MACs" in text
    assert "lowrank plan ... --engine auto" in text
    assert torch.get_num_threads() == before


def test_plan_converts_first_if_a_scheme_is_given(output_of, file):
    named = (f"{file}dense", "--input", "1x8x8")
    dense, low_rank = (
        json.loads(output_of("plan", *named, *scheme, *QUICK, "--json")) for scheme in ([], ["--scheme", "lr"])
    )
    assert low_rank["macs"] < dense["macs"] == low_rank["twin"]["macs"]
    assert "twin" not in dense
    assert low_rank["choice"] in low_rank["times"]


def test_plan_takes_a_network_whose_macs_cannot_be_counted(output_of, file):
    options = [f"{file}uncounted", "--scheme", "lr", "--input", "3x8x8", *QUICK]
    text = output_of("plan", *options)
    assert "of its time." in text
    assert json.loads(output_of("plan", *options, "--json"))["macs"] is None


def test_weights_of_ones_own_network_are_counted_timed_and_planned(output_of, file, tmp_path):
    weights, macs = tmp_path / "own.safetensors", 7 * 7 * 6 * 3
    output_of("export", f"{file}dense", weights, "--scheme", "lr", "--input", "1x9x9")
    named = (weights, "--into", f"{file}dense", "--json")  # the file knows the size of its images
    assert json.loads(output_of("count", *named))["macs"] == macs
    (timing,) = json.loads(output_of("time", *named, "--repeats", "3", "--threads", "1"))["timings"]
    assert (timing["macs"], timing["twin"]["macs"], timing["threads"]) == (macs, 3 * macs, 1)
    planned = json.loads(output_of("plan", *named, *QUICK))
    assert (planned["input"], planned["twin"]["macs"]) == ([1, 1, 9, 9], 3 * macs)


def test_an_exported_file_is_timed_and_asked(output_of, tmp_path):
    image, net = tmp_path / "a.png", tmp_path / "net.onnx"
    Image.new("RGB", (32, 32), (200, 30, 30)).save(image)
    named = ("nin-c3-lr", "--pretrained", "cifar10")
    output_of("export", named[0], net, *named[1:], "--preprocess", "nhwc", "--dynamic", "none")
    (timing,) = json.loads(output_of("time", net, "--repeats", "3", "--json"))["timings"]
    assert (timing["runtime"], timing["input"]) == ("onnxruntime", [2, 32, 32, 3])
    right, found = (json.loads(output_of("predict", *model, image, "--json")) for model in (named, (net,)))
    assert [c["class"] for c in found[0]["classes"]] == [c["class"] for c in right[0]["classes"]]
    assert fits(output_of("time", net, "--repeats", "3"))


def test_networks_of_other_inputs_are_timed_and_planned(output_of, file):
    named = (f"{file}make", "--example", f"{file}inputs", "--scheme", "lr", "--repeats", "3")
    assert "2x3x8x8 and 2, torch" in output_of("time", *named)
    planned = json.loads(output_of("plan", *named, "--no-cache", "--json"))
    assert planned["input"] == [[2, 3, 8, 8], [2]]
    assert planned["twin"]["macs"] == 3 * planned["macs"] == 2 * 36 * 4 * 27
    (timing,) = json.loads(output_of("time", f"{file}series", "--input", "2x9", "--json"))["timings"]
    assert (timing["input"], timing["macs"]) == ([1, 2, 9], 7 * 4 * 6)
    assert "Fastest" in output_of("plan", f"{file}half", "--input", "3x8x8", *QUICK)
    for more, says in (
        (["--batch", "2"], "leave --batch out"),
        (["--input", "3x8x8"], "leave --input out"),
        (["--engine", "auto"], "let --example give one tensor"),
    ):
        with pytest.raises(LowRankError, match=says):
            output_of("plan", *named, *more)


def test_threads_are_limited_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert limit_threads(1) == 1
    assert os.environ["OMP_NUM_THREADS"] == "7", "torch is loaded already, and has its threads"
    monkeypatch.delitem(sys.modules, "torch")
    for threads, expected in ((None, "7"), (0, "7"), (3, "3")):
        assert limit_threads(threads) == threads
        assert os.environ["OMP_NUM_THREADS"] == expected


def test_one_engine_is_timed_beside_a_thin_rival_and_written(output_of, tmp_path):
    out = tmp_path / "files"
    how = ("plan", "nin-c3-lr", "--width", "0.05", "--engine", "torchscript")
    found = json.loads(output_of(*how, "--out", out, "--json"))
    assert found["fastest"].startswith("torchscript")
    assert set(found["times"]) <= {"torchscript, fp32", "torchscript, fp16"}
    assert found["rival"].keys() == found["times"].keys()
    assert "A thinner dense network of the same MACs takes" in found["verdict"]
    assert found["path"] == str(out / "net.ts")
    assert (out / "net.ts").is_file()


def test_the_thin_rival_of_a_narrow_network_has_its_macs():
    """Rounded to sixteens, the thin dense network has 0.83 of the dense MACs in place of 0.38."""
    size, network = (3, 32, 32), lr.create_model("nin-c3-lr", width=0.1).eval()
    rival = thin_like(lr.create_model("nin", width=0.1), network, size)
    assert rival is not None
    assert lr.count(rival, size).macs == pytest.approx(lr.count(network, size).macs, rel=0.2)
    assert thin_like(network, network, size) is None  # a low-rank network is not thinned


def test_optimize_writes_what_it_found(output_of, own, two_inputs, tmp_path):
    net, options = tmp_path / "fast.safetensors", ("--input", "3x9x7", *QUICK)
    text = output_of("optimize", f"{own}:net", "-o", net, *options)
    assert fits(text)
    found = lr.load(net, into=nn.Sequential(nn.Conv2d(3, 8, 3)))
    assert f"Fastest: {found.report.choice}" in text
    assert found(torch.zeros(1, 3, 9, 7)).shape == (1, 8, 7, 5)
    with pytest.raises(LowRankError, match="--overwrite replaces it"):
        output_of("optimize", f"{own}:net", "-o", net, *options)
    example = ("--example", f"{two_inputs}:named", "--budget", "5", *QUICK, "--json")
    found = json.loads(output_of("optimize", f"{two_inputs}:net", "-o", tmp_path / "fast.onnx", *example))
    assert found["input"] == [[2, 3, 8, 8], [2, 5]]
    assert {time["runs"] for time in found["times"].values()} == {3}
    assert (tmp_path / "fast.onnx").is_file()
