"""The format of a network's file."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import replacing
from lowrank_cnn.models.network_file import read_header, write_network_file


def test_weights_keep_their_precision_and_a_shared_tensor_is_written_once(tmp_path: Path):
    shared = torch.randn(3, 4)
    weights = {"a": shared, "b": shared, "half": torch.randn(2).bfloat16(), "steps": torch.tensor(7)}
    write_network_file(tmp_path / "net.safetensors", weights, {"model": None}, {"mean": torch.ones(3)})
    file = read_header(tmp_path / "net.safetensors")
    assert file.shapes == {"a": (3, 4), "half": (2,), "steps": ()}
    found = file.weights()
    assert found["half"].dtype == torch.bfloat16
    assert torch.equal(found["a"], shared)
    assert file.preprocess().keys() == {"mean"}
    assert file.description == {"model": None}


def test_the_description_may_name_a_precision_to_compute_in(tmp_path: Path):
    weights = {"a": torch.randn(3).half(), "steps": torch.tensor(7)}
    write_network_file(tmp_path / "net.safetensors", weights, {"dtype": "torch.float32"}, {})
    found = read_header(tmp_path / "net.safetensors").weights()
    assert (found["a"].dtype, found["steps"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    "header", [None, {"lowrank_cnn": "["}, {"lowrank_cnn": "[1]"}, {"lowrank_cnn": "[" * 10**5}]
)
def test_a_file_without_a_description_is_refused_in_a_sentence(tmp_path: Path, header: dict[str, str] | None):
    path = tmp_path / "net.safetensors"
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
