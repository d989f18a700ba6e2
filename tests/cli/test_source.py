"""Networks by name, of other libraries, in a file of the user's own, and out of weights."""

import json
import sys
from types import ModuleType

import pytest
from torch import nn

from lowrank_cnn.cli.source import find_model
from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.core.notes import notes


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3))


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm and torchvision as far as a command uses them."""
    timm, torchvision, models = ModuleType("timm"), ModuleType("torchvision"), ModuleType("torchvision.models")

    given: list[dict] = []
    asked: list[tuple[str, object]] = []
    models.given, models.asked = given, asked

    def create(name: str, pretrained: bool, **options: int) -> nn.Module:
        asked.append((name, pretrained))
        given.append(options)
        if name == "vgg11":
            raise RuntimeError("no such weights\nat all")
        network = resnet()
        network.pretrained_cfg = {"input_size": (3, 20, 24), "pretrained": pretrained}
        return network

    timm.list_models = models.list_models = lambda: ["resnet18", "vgg11", "fcn"]
    timm.create_model = create
    models.get_model_builder = lambda name: resnet if name != "fcn" else lambda weights, weights_backbone: None

    def get_model(name: str, weights: str | None, num_classes: int = 4, **backbone: object) -> nn.Module:
        asked.append((name, weights))
        given.append(backbone)
        network = resnet()
        network[3] = nn.Conv2d(8, num_classes, 3)
        return network

    models.get_model = get_model
    torchvision.models = models
    for module in (timm, torchvision, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("zoo")
def test_networks_of_timm_and_torchvision_convert(output_of):
    printed = json.loads(output_of("convert", "timm:resnet18", "--scheme", "lr", "--json"))
    assert printed["input"] == [3, 20, 24]
    assert [row["name"] for row in printed["changed"]] == ["0", "3"]
    assert json.loads(output_of("convert", "timm:resnet18.some_weights", "--json"))["input"] == [3, 20, 24]
    assert json.loads(output_of("convert", "torchvision:vgg11", "--json"))["input"] == [3, 224, 224]
    output_of("convert", "torchvision:fcn")
    assert sys.modules["torchvision.models"].given[-2:] == [{}, {"weights_backbone": None}]
    for model, says in (
        ("timm:vgg11", r"timm:vgg11 does not run: RuntimeError: no such weights$"),
        ("timm:resnet19", "timm has no network 'resnet19'; did you mean resnet18"),
        ("torchvision:resnet19", "torchvision has no network 'resnet19'; did you mean resnet18"),
    ):
        with pytest.raises(LowRankError, match=says):
            output_of("convert", model, "--pretrained", "default")


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize(
    ("model", "weights", "asked"),
    [
        ("timm:resnet18", None, ("resnet18", False)),
        ("timm:resnet18", "default", ("resnet18", True)),
        ("timm:resnet18", "", ("resnet18", True)),
        ("timm:resnet18", "a1_in1k", ("resnet18.a1_in1k", True)),
        ("torchvision:resnet18", None, ("resnet18", None)),
        ("torchvision:resnet18", "default", ("resnet18", "DEFAULT")),
        ("torchvision:resnet18", "", ("resnet18", "DEFAULT")),
        ("torchvision:resnet18", "IMAGENET1K_V1", ("resnet18", "IMAGENET1K_V1")),
    ],
)
def test_weights_of_others_are_taken_by_name(output_of, model: str, weights: str | None, asked: tuple):
    words = [] if weights is None else ["--pretrained", *filter(None, [weights])]
    output_of("convert", model, *words, "--scheme", "lr")
    output_of("convert", "--scheme", "lr", *words, model)
    assert sys.modules["torchvision.models"].asked == [asked, asked]


def test_without_timm_the_command_says_how_to_get_it(output_of, monkeypatch: pytest.MonkeyPatch):
    for name in ("timm", "torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"timm:resnet18 needs timm: pip install '\.\[zoo\]'"):
        output_of("convert", "timm:resnet18")
    with pytest.raises(MissingExtra, match="torchvision:vgg11 needs torchvision"):
        output_of("convert", "torchvision:vgg11")


def test_a_file_runs_as_a_script_with_its_neighbours_and_dataclasses(output_of, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_model.py").write_text("FILTERS = 8\n")
    (tmp_path / "model.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_model import FILTERS\n"
        "from torch import nn\n@dataclass\nclass Options:\n    filters: int = FILTERS\n"
        "def make():\n    return nn.Conv2d(3, Options().filters, 3)\n"
    )
    source = find_model(f"{tmp_path}/model.py:make")
    assert (source.network.out_channels, notes(source.network).name) == (8, "model.py:make")
    printed = json.loads(output_of("convert", f"{tmp_path}/model.py:make", "--input", "3x8x8", "--json"))
    assert printed["changed"][0]["before"] == "3x3,8"


CLASSES = tuple("abcdefg")


@pytest.mark.usefixtures("zoo")
def test_the_last_layer_fits_the_classes_and_the_rest_stays_trained():
    given = sys.modules["torchvision.models"].given
    fresh = find_model("torchvision:resnet18", classes=CLASSES)
    assert (fresh.network[3].out_channels, fresh.remark) == (7, "")
    trained = find_model("torchvision:resnet18", classes=CLASSES, pretrained="default")
    assert trained.network[3].out_channels == 7
    assert trained.remark == "The last layer is new, for 7 classes; the others begin with trained weights."
    for scheme, told in (
        ("lr", "Layers that lr rewrites begin with fresh weights"),
        ("separable(m=1)", "nearest"),
    ):
        assert told in trained.cheaper(scheme, None, (3, 8, 8), pretrained=True).remark
    assert notes(trained.network).begun_from == "torchvision:resnet18, default"
    find_model("timm:resnet18", classes=CLASSES)
    assert given[-1] == {"num_classes": 7}
