"""Networks shared as folders and through a Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.cli.source import find_model
from lowrank_cnn.core.errors import LowRankError
from tests.support import assert_equal_weights

hf = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The folders of a Hub on this machine, by repository."""
    folders: dict[str, Path] = {}

    class Api:
        def __init__(self, token: str | None = None) -> None:
            if token == "expired":
                raise ConnectionError("401 Unauthorized")

        def create_repo(self, repository: str, **_: object) -> None:
            folders[repository] = tmp_path / repository

        def upload_folder(self, *, repo_id: str, folder_path: str, **_: object) -> SimpleNamespace:
            shutil.copytree(folder_path, folders[repo_id])
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{COMMIT}")

    def download(repository: str, name: str, *, revision: str | None) -> str:
        assert revision in (None, "main")
        return str(folders[repository] / name)

    monkeypatch.setattr(hf, "HfApi", Api)
    monkeypatch.setattr(hf, "hf_hub_download", download)
    return folders


@pytest.fixture
def trained() -> lr.Network:
    return lr.create_model("nin-c3-lr", pretrained="cifar10")


def test_a_folder_gives_back_the_network_its_classes_and_its_preprocessing(trained, tmp_path):
    folder = trained.save_pretrained(tmp_path / "net", licence="apache-2.0")
    again = lr.from_pretrained(folder)
    assert_equal_weights(trained, again)
    assert not again.training
    image = torch.randint(0, 255, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert lr.predict(again, image, device="cpu") == lr.predict(trained, image, device="cpu")
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["name"] == "nin-c3-lr"
    assert len(config["preprocess"]["mean"]) == 3
    assert_equal_weights(trained, lr.load(folder))


def test_a_network_is_pushed_fetched_and_named_everywhere(trained, local_hub):
    address = trained.push_to_hub("someone/net", token="hf_x")
    assert address.endswith(COMMIT)
    names = sorted(path.name for path in local_hub["someone/net"].iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    assert_equal_weights(trained, lr.from_pretrained("someone/net"))
    assert_equal_weights(trained, lr.load("hf-hub:someone/net@main"))
    source = find_model("hf-hub:someone/net")
    assert (source.name, source.input_size) == ("hf-hub:someone/net", (3, 32, 32))
    assert source.trained is not None
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    assert lr.predict("hf-hub:someone/net", image, device="cpu") == lr.predict(trained, image, device="cpu")


def test_a_network_of_ones_own_is_loaded_into_it(tmp_path):
    own = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    low_rank = lr.convert(own, "lr")
    folder = lr.save_pretrained(low_rank, tmp_path)
    assert_equal_weights(low_rank, lr.from_pretrained(folder, into=own))
    with pytest.raises(LowRankError, match="not one of our networks"):
        lr.from_pretrained(folder)
    assert "into=your_network" in (folder / "README.md").read_text()


@pytest.mark.usefixtures("local_hub")
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nobody/none", r"nobody/none is no local folder, and its model.safetensors could not be fetched"),
        ("hf-hub:nobody", "is written user/name, not 'nobody'"),
        ("hf-hub:../../etc/passwd", "is written user/name"),
        (Path(__file__).parent, "holds no model.safetensors"),
        (__file__, "is not a safetensors file"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(source, says):
    with pytest.raises(LowRankError, match=says):
        lr.from_pretrained(source)


def test_what_cannot_be_pushed_is_one_sentence(trained, local_hub):
    with pytest.raises(LowRankError, match="is written user/name"):
        trained.push_to_hub("net")
    with pytest.raises(LowRankError, match=r"someone/net could not be uploaded .*hf auth login"):
        trained.push_to_hub("someone/net", token="expired")
    assert not local_hub


def test_torch_hub_builds_the_networks():
    root = str(Path(__file__).parents[2])
    network = torch.hub.load(root, "nin_c3_lr", source="local", pretrained="cifar10")
    assert network.config["norm"] == "batch"
    assert torch.hub.load(root, "vgg11_gmp_lr", source="local", width=0.1).config["width"] == 0.1


def test_a_trained_network_says_what_it_costs_and_how_good_it_is(trained, tmp_path: Path):
    card = hf.ModelCard.load(
        lr.save_pretrained(trained, tmp_path, licence="mit", name="someone/net") / "README.md"
    )
    assert (card.data.library_name, card.data.license) == ("lowrank-cnn", "mit")
    assert [result.metric_value for result in card.data.eval_results] == [0.9327, 0.9973]
    cost = lr.count(trained, trained.input_size)
    assert f"{cost.macs / 1e6:.0f}M" in card.text
    assert "its dense twin" in card.text
    assert "airplane" in card.text
    assert 'lr.from_pretrained("someone/net")' in card.text


def test_a_converted_network_names_its_schemes_and_given_metrics(tmp_path: Path):
    network = lr.convert(lr.create_model("nin", width=0.1, num_classes=5), "separable")
    text = (lr.save_pretrained(network, tmp_path, metrics={"top1": 0.5}) / "README.md").read_text()
    assert "`separable`" in text
    assert "value: 0.5" in text
    assert "It has no classes yet" in text
