import json
import sys
from types import ModuleType

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from lowrank_cnn.cli import deploy, models
from lowrank_cnn.count import count
from lowrank_cnn.deploy.export import load
from lowrank_cnn.errors import LowRankError, MissingExtra
from lowrank_cnn.models import create_model

SMALL = ["--width", "0.1"]


def lowrank(*arguments: str) -> str:
    """Run a command and give what it prints; errors come through."""
    app = typer.Typer()
    deploy.add_to(app)
    models.add_to(app)
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3))


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm and torchvision as far as a command uses them."""
    timm, torchvision, models = ModuleType("timm"), ModuleType("torchvision"), ModuleType("torchvision.models")

    given: list[dict] = []
    models.given = given

    def create(name: str, pretrained: bool) -> nn.Module:
        if name == "vgg11":
            raise RuntimeError("no such weights\nat all")
        network = resnet()
        network.pretrained_cfg = {"input_size": (3, 20, 24), "pretrained": pretrained}
        return network

    timm.list_models = models.list_models = lambda: ["resnet18", "vgg11", "fcn"]
    timm.create_model = create
    models.get_model_builder = lambda name: resnet if name != "fcn" else lambda weights, weights_backbone: None
    models.get_model = lambda name, weights, **backbone: given.append(backbone) or resnet()
    torchvision.models = models
    for module in (timm, torchvision, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 8, 3))\nother = net().to\n"
    )
    return path


def test_convert_prints_layers_costs_and_what_was_left():
    text = lowrank("convert", "nin", "--scheme", "lr-join", *SMALL)
    assert fits(text)
    assert "features.conv2_1" in text
    assert "5x1,10 + 1x5,9 -> 1x1,19" in " ".join(text.split())
    assert "of the MACs" in text
    assert "its kernel is 1x1" in text


def test_convert_as_json_agrees_with_the_counter():
    printed = json.loads(lowrank("convert", "nin", "--scheme", "lr", "--where", "5x5", "--json"))
    assert [row["name"] for row in printed["changed"]] == ["features.conv1_1", "features.conv2_1"]
    assert printed["costs"][-1]["macs_before"] == count(create_model("nin"), (3, 30, 30)).macs


def test_convert_takes_stages_kernels_and_names_together():
    options = ["--stage", "3", "--where", "*conv1*", "--where", "7x7", "--json", *SMALL]
    printed = json.loads(lowrank("convert", "nin", *options))
    assert [row["name"] for row in printed["changed"]] == ["features.conv1_1", "features.conv3_1"]


def test_weights_of_a_network_that_is_not_ours_are_put_into_it(own, tmp_path):
    out, size = tmp_path / "net.safetensors", ["--input", "3x8x8"]
    lowrank("convert", f"{own}:net", "--scheme", "lr", "--out", out, *size)
    with pytest.raises(LowRankError, match=r"Sequential is not one of our networks.*--into path.py:function"):
        lowrank("export", out, tmp_path / "net.pt2", *size)
    printed = json.loads(lowrank("export", out, tmp_path / "net.pt2", "--into", f"{own}:net", "--json", *size))
    assert printed["error"] < 1e-5


def test_convert_fits_within_a_budget(tmp_path):
    out = tmp_path / "net.safetensors"
    printed = json.loads(
        lowrank("convert", "nin", "--scheme", "separable", "--macs", "0.5", "--out", out, "--json", *SMALL)
    )
    total = printed["costs"][-1]
    assert total["macs_after"] <= 0.5 * total["macs_before"] + 1
    assert all(0 < row["energy"] <= 1 for row in printed["fitted"])
    assert "energy" in lowrank("convert", "nin", "--fit", *SMALL)
    again = json.loads(lowrank("time", str(out), "--repeats", "3", "--json"))
    assert again["timings"][0]["macs"] == total["macs_after"]


@pytest.mark.usefixtures("zoo")
def test_networks_of_timm_and_torchvision_convert():
    printed = json.loads(lowrank("convert", "timm:resnet18", "--scheme", "lr", "--json"))
    assert printed["input"] == [3, 20, 24]
    assert [row["name"] for row in printed["changed"]] == ["0", "3"]
    assert json.loads(lowrank("convert", "timm:resnet18.some_weights", "--json"))["input"] == [3, 20, 24]
    assert json.loads(lowrank("convert", "torchvision:vgg11", "--json"))["input"] == [3, 224, 224]
    lowrank("convert", "torchvision:fcn")
    assert sys.modules["torchvision.models"].given == [{}, {"weights_backbone": None}]
    with pytest.raises(LowRankError, match=r"timm:vgg11 does not run: RuntimeError: no such weights$"):
        lowrank("convert", "timm:vgg11", "--pretrained")
    with pytest.raises(LowRankError, match="timm has no network 'resnet19'; did you mean resnet18"):
        lowrank("convert", "timm:resnet19")


def test_without_timm_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    for name in ("timm", "torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"timm:resnet18 needs timm: pip install 'lowrank-cnn\[zoo\]'"):
        lowrank("convert", "timm:resnet18")
    with pytest.raises(MissingExtra, match="torchvision:vgg11 needs torchvision"):
        lowrank("convert", "torchvision:vgg11")


def test_a_function_in_the_users_own_file(own):
    printed = json.loads(lowrank("convert", f"{own}:net", "--input", "3x8x8", "--json"))
    assert printed["changed"][0]["before"] == "3x3,8"
    with pytest.raises(LowRankError, match="give --input"):
        lowrank("convert", f"{own}:net")
    with pytest.raises(LowRankError, match="no function 'nett'"):
        lowrank("convert", f"{own}:nett")
    own.write_text("def net():\n    return 3\nraise_ = 1")
    with pytest.raises(LowRankError, match=r"mine.py:net is to give an nn.Module, but gives 3\."):
        lowrank("convert", f"{own}:net", "--input", "3x8x8")
    own.write_text("def net(size):\n    return size")
    with pytest.raises(LowRankError, match=r"does not run: TypeError: net\(\) missing 1 required"):
        lowrank("convert", f"{own}:net", "--input", "3x8x8")
    own.write_text("1 / 0")
    with pytest.raises(LowRankError, match="does not run: ZeroDivisionError"):
        lowrank("convert", f"{own}:net")


def test_time_prints_layers_correlation_and_the_twin():
    text = lowrank("time", "nin-c3-lr", "--repeats", "3", *SMALL)
    assert fits(text)
    assert "features.conv1_1" in text
    assert "correlate with r" in text
    assert "Dense twin nin:" in text


def test_time_of_several_networks_correlates_them(own):
    names = ["nin", "nin-c3", "nin-c3-lr"]
    assert "Over these networks" in lowrank("time", *names, "--repeats", "3", *SMALL)
    options = ["--scheme", "lr", "--input", "3x8x8", "--repeats", "3", "--threads", "1", "--json"]
    (timing,) = json.loads(lowrank("time", f"{own}:net", *options))["timings"]
    assert timing["threads"] == 1
    assert timing["twin"]["macs"] == 3 * timing["macs"]


def test_plan_prints_every_way_and_the_choice():
    before = torch.get_num_threads()
    text = lowrank("plan", "nin-c3-lr", "--no-cache", "--threads", "1", *SMALL)
    assert fits(text)
    assert "Fastest:" in text
    printed = json.loads(lowrank("plan", "nin-c3-lr", "--no-cache", "--json", *SMALL))
    assert printed["choice"] in printed["times"]
    assert torch.get_num_threads() == before


def test_export_writes_and_reports(tmp_path):
    path = tmp_path / "net.pt2"
    printed = json.loads(
        lowrank("export", "nin", path, "--scheme", "lr", "--norm", "batch", "--merge", "--json", *SMALL)
    )
    assert printed["path"] == str(path)
    assert printed["error"] < 1e-4
    with pytest.raises(LowRankError, match="exists"):
        lowrank("export", "nin", path, *SMALL)
    assert "MiB" in lowrank("export", "nin", path, "--overwrite", *SMALL)


def test_weights_of_ones_own_network_are_counted_timed_and_planned(tmp_path):
    own, weights = tmp_path / "own.py", tmp_path / "own.safetensors"
    own.write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())\n")
    lowrank("export", f"{own}:make", weights, "--scheme", "lr", "--input", "1x9x9")
    named = ("--into", f"{own}:make", "--input", "1x9x9", "--json")
    assert json.loads(lowrank("count", weights, *named))["macs"] == 7 * 7 * 6 * 3
    assert json.loads(lowrank("time", weights, "--repeats", "3", *named))["timings"][0]["macs"] == 7 * 7 * 6 * 3
    assert json.loads(lowrank("plan", weights, "--no-cache", *named))["input"] == [1, 1, 9, 9]


def test_export_writes_the_packages_own_weights(tmp_path):
    lowrank("export", "nin-c3-lr", tmp_path / "net.safetensors", "--pretrained")
    ours, right = load(tmp_path / "net.safetensors"), create_model("nin-c3-lr", pretrained="cifar10")
    assert ours.state_dict().keys() == right.state_dict().keys()
    for name, value in right.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["convert", "nim"], "did you mean nin"),
        (["convert", "net.pt"], "names no network"),
        (["convert", "nothing.py:net"], "no file nothing.py"),
        (["convert", "nin", "--scheme", "embed"], "number of channels"),
        (["convert", "nin", "--where", "layer1"], "no convolution is called 'layer1'"),
        (["convert", "nin", "--input", "30x30"], "CHANNELSxHEIGHTxWIDTH"),
        (["convert", "nin", "--stage", "4"], "has 3 stages"),
        (["convert", "torchvision:vgg11", "--width", "0.5"], "taken as it is; width can be set"),
        (["convert", __file__], "names no network"),
        (["time", "nin", "--batch", "0"], "batch must be positive"),
        (["time", "nin", "--repeats", "1"], "3 runs at least"),
        (["time", "nin", "--threads", "0"], "number of threads is positive"),
        (["time", "nin", "--device", "gpu"], "no device 'gpu'"),
        (["plan", "nin", "--device", "gpu"], "no device 'gpu'"),
        (["plan", "nin", "--batch", "0"], "batch must be positive"),
        (["time", "nin", "--runtime", "onnx", "--device", "cuda"], "timed on the CPU"),
        (["export", "nin", "net.bin"], "ends in .onnx"),
        (["export", "vgg11-gmp", "net.onnx", "--pretrained"], "no trained weights of vgg11-gmp"),
        (["export", "net.safetensors", "net.onnx", "--pretrained"], "taken with the weights it has"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], says: str):
    with pytest.raises(LowRankError, match=says):
        lowrank(*arguments)
