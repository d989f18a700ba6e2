"""A file of weights says what network they are of, what images it takes, and what these are prepared with."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import replacing
from lowrank_cnn.core.notes import TrainingCard, notes
from lowrank_cnn.models import create_model
from lowrank_cnn.models.network_file import (
    Stored,
    is_exported,
    read_header,
    read_weights,
    write_network_file,
    write_weights,
)
from tests.support import assert_equal_weights

CARD = {"data": {"classes": ["a", "b"], "image": [1, 16, 16]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


def change_header(path: Path, change: dict[str, object], *, empty: bool = False) -> None:
    """Rewrite what the header of a file says; `model` changes single options of the network."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["lowrank_cnn"])
    model = {**about["model"], **change["model"]} if "model" in change else about["model"]  # type: ignore[dict-item]
    header = {"lowrank_cnn": json.dumps({**about, **change, "model": model})}
    save_file({} if empty else load_file(path), path, metadata=header)


def test_size_card_and_preparation_come_back(path: Path):
    net = create_model("nin-c3-lr", width=0.05, in_channels=1, num_classes=2)
    mean = torch.tensor([3.0])
    write_weights(path, Stored(net, (1, 14, 14), TrainingCard(CARD, {"mean": mean})))
    found = read_weights(path)
    assert found.input_size == notes(found.network).input_size == (1, 14, 14)
    assert found.card.card == CARD
    assert torch.equal(found.card.preprocess["mean"], mean)
    assert found.network.state_dict().keys() == net.state_dict().keys()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_layers_that_share_a_weight_share_it_again(path: Path):
    write_weights(path, Stored(Tied(), None, TrainingCard({}, {"mean": torch.ones(1)})))
    again = read_weights(path, into=Tied()).network
    assert torch.equal(again.first.weight, load_file(path)["first.weight"])
    assert again.second.weight is again.first.weight


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_other_weights_are_refused(path: Path, change: str):
    write_weights(path, Stored(create_model("nin", width=0.05)))
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    tensors["more.weight"] = torch.ones(2)
    if change == "missing":
        del tensors["more.weight"], tensors["features.conv1_1.weight"]
    save_file(tensors, path, metadata=header)
    with pytest.raises(LowRankError, match=r"do not fit the network: .*weight is missing or unknown"):
        read_weights(path)


@pytest.mark.parametrize("size", ["3x3", [3, 0, 3], [3, 8], [3, "8", 8], None])
def test_a_size_that_is_none_is_left_out(path: Path, size: object):
    write_weights(path, Stored(create_model("nin", width=0.05), (3, 8, 8)))
    change_header(path, {"input": size})
    assert read_weights(path).input_size is None


def test_a_checkpoint_of_a_run_is_no_exported_file(tmp_path):
    path = tmp_path / "step-00000001.safetensors"
    assert not is_exported(path)
    path.write_bytes(b"")
    assert is_exported(path)
    path.with_suffix(".json").write_text("{}")
    assert not is_exported(path)


def test_every_tensor_keeps_its_precision(tmp_path):
    path = tmp_path / "net.safetensors"
    net = create_model("nin-c3-lr", width=0.05, norm="batch").bfloat16()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.float()
    write_weights(path, Stored(net))
    into = nn.Sequential(nn.Conv2d(3, 4, 3).bfloat16(), nn.BatchNorm2d(4))
    write_weights(tmp_path / "foreign.safetensors", Stored(into))
    pairs = [(net, read_weights(path).network)]
    fresh = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    pairs.append((into, read_weights(tmp_path / "foreign.safetensors", into=fresh).network))
    for before, after in pairs:
        assert_equal_weights(before, after)
    assert fresh[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": {"name": "vgg11", "width": 64.0}}, "missing or unknown"),
        ({"model": {"num_classes": 10**9}}, "num_classes must be .* at most 10,000,000, not 1,000,000,000"),
        ({"model": {"num_classes": 10**6}}, r"bias is \[10\] in the file and \[1000000\] in the"),
        ({"model": {"name": "vgg11", "image_size": 10**5, "width": 64.0}}, "missing or unknown"),
        ({"conversion": {"changed": [{"name": "features.conv1_1", "scheme": "lr-join(m=999999999)"}]}}, "missing"),
        ({"model": {"name": ["nin"]}}, "there is no network"),
        ({"model": {"colour": 1}}, "not those of a network"),
        ({"model": {"width": "1"}}, "width must be a number above 0"),
    ],
)
def test_a_small_file_that_names_a_large_network_is_refused(path: Path, change: dict, match: str):
    write_weights(path, Stored(create_model("nin", width=0.05)))
    change_header(path, change, empty="vgg11" in str(change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LowRankError, match=match):
        read_weights(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB: 256 MiB


def test_a_large_conversion_of_a_foreign_network_is_refused_before_it_is_built(path: Path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3))
    write_weights(path, Stored(net))
    change_header(path, {"conversion": {"changed": [{"name": "0", "scheme": "lr-join(m=999999999)"}]}})
    with pytest.raises(LowRankError, match="missing or unknown"):
        read_weights(path, into=net)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_network_with_weights_that_a_hook_computes_comes_back(tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU()).eval()

    net, path = make(), tmp_path / "net.safetensors"
    write_weights(path, Stored(net))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(read_weights(path, into=make()).network(x), net(x))


def test_a_shared_tensor_is_written_once_and_the_description_may_name_a_precision(path: Path):
    shared = torch.randn(3, 4)
    weights = {"a": shared, "b": shared, "half": torch.randn(2).bfloat16(), "steps": torch.tensor(7)}
    write_network_file(path, weights, {"model": None}, {"mean": torch.ones(3)})
    file = read_header(path)
    assert file.shapes == {"a": (3, 4), "half": (2,), "steps": ()}
    assert torch.equal(file.weights()["a"], shared)
    assert file.preprocess().keys() == {"mean"}
    assert file.description == {"model": None}
    write_network_file(path, weights, {"dtype": "torch.float32"}, {})
    found = read_header(path).weights()
    assert (found["half"].dtype, found["steps"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    "header", [None, {"lowrank_cnn": "["}, {"lowrank_cnn": "[1]"}, {"lowrank_cnn": "[" * 10**5}]
)
def test_a_file_without_a_description_is_refused_in_a_sentence(path: Path, header: dict[str, str] | None):
    save_file({"a": torch.ones(1)}, path, metadata=header)
    with pytest.raises(LowRankError, match=r"build a network"):
        read_header(path)


def test_what_is_no_tensor_and_no_safetensors_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(LowRankError, match="not a tensor"):
        write_network_file(tmp_path / "a.safetensors", {"a": 3}, {}, {})  # type: ignore[dict-item]
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(LowRankError, match="is not a safetensors file"):
        read_header(tmp_path / "b.safetensors")


def test_an_error_of_the_system_is_raised_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(LowRankError, match="the disk is full"), replacing(tmp_path / "net.safetensors") as file:
        write_network_file(file, {"weight": torch.ones(2)}, {}, {})
