"""Checkpoints: read back exactly, any damage noticed, never half of one in place of a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.run_folder import (
    Checkpoint,
    CheckpointStore,
    DamagedCheckpointError,
    read_checkpoint,
    write_checkpoint,
)


def sample(value: float = 1.0) -> Checkpoint:
    tensors = {
        "model.weight": torch.full((2, 3, 4, 4), value).contiguous(memory_format=torch.channels_last),
        "model.steps": torch.tensor(7),
        "random.0.torch": torch.get_rng_state(),
        "average.half": torch.tensor([value], dtype=torch.bfloat16),
    }
    return Checkpoint(tensors, {"epoch": 3, "rate": 0.1 + 0.2, "history": [{"loss": None}]})


def test_a_checkpoint_reads_back_exactly(tmp_path):
    write_checkpoint(tmp_path / "step-1", sample())
    back = read_checkpoint(tmp_path / "step-1")
    assert back.state == sample().state
    assert back.tensors.keys() == sample().tensors.keys()
    for name, tensor in sample().tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)
    assert back.part("model").keys() == {"weight", "steps"}


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_is_noticed(tmp_path, suffix, where, bit):
    write_checkpoint(tmp_path / "step-1", sample())
    path = tmp_path / f"step-1{suffix}"
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="step-1"):
        read_checkpoint(tmp_path / "step-1")


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@given(kept=st.floats(0, 1, exclude_max=True))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_is_noticed_and_the_one_before_used(tmp_path, suffix, kept):
    store, said = CheckpointStore(tmp_path), []
    store.save(sample(1.0), 1)
    store.save(sample(2.0), 2)
    path = tmp_path / f"step-00000002{suffix}"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    found = store.latest(said.append)
    assert found is not None
    assert found.tensors["model.weight"].unique().item() == 1.0
    assert len(said) == 1
    assert path.name in said[0]


def test_a_missing_half_is_noticed(tmp_path):
    store, said = CheckpointStore(tmp_path), []
    store.save(sample(1.0), 1)
    store.save(sample(2.0), 2)
    (tmp_path / "step-00000002.safetensors").unlink()
    assert store.latest(said.append) is not None
    assert "cannot be read" in said[0]


def test_when_all_are_damaged_nothing_is_started_over(tmp_path):
    CheckpointStore(tmp_path).save(sample(), 1)
    (tmp_path / "step-00000001.json").write_text("{}")
    with pytest.raises(LowRankError, match="every checkpoint"):
        CheckpointStore(tmp_path).latest(pytest.fail)


def test_an_empty_directory_holds_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path).latest(lambda _: None) is None


def test_two_are_kept_and_one_best(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (1, 5, 9):
        store.save(sample(), iteration)
        store.save(sample(), iteration, kind="best", keep=1)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "best-00000009.json",
        "step-00000005.json",
        "step-00000009.json",
    ]
    assert len(list(tmp_path.iterdir())) == 6


def test_after_going_back_the_future_is_forgotten(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(sample(1.0), 4)
    store.save(sample(2.0), 8)
    (tmp_path / "step-00000008.json").write_text("spoilt")
    store.save(sample(3.0), 6)
    found = store.latest(pytest.fail)
    assert found is not None
    assert found.tensors["model.weight"].unique().item() == 3.0
    assert [path.stem for path in sorted(tmp_path.glob("*.json"))] == ["step-00000004", "step-00000006"]


def test_a_half_written_pair_does_not_push_out_a_whole_one(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(sample(1.0), 1)
    (tmp_path / "step-00000002.safetensors").write_bytes(b"killed here")
    store.save(sample(3.0), 3)
    assert [path.stem for path in sorted(tmp_path.glob("*.json"))] == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY, errno.EIO])
def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch, code):
    store = CheckpointStore(tmp_path)

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        for iteration in (1, 2, 3):
            store.save(sample(iteration), iteration)
    found = store.latest(pytest.fail)
    assert found is not None
    assert found.tensors["model.weight"].unique().item() == 3.0
    store.save(sample(4.0), 4)
    assert len(list(tmp_path.glob("step-*"))) == 4


@pytest.mark.parametrize("kind", ["directory", "deep", "fifo", "bytes", "list"])
def test_a_newest_manifest_of_any_kind_is_passed_over(tmp_path, kind):
    store, said, odd = CheckpointStore(tmp_path), [], tmp_path / "step-00000002.json"
    store.save(sample(1.0), 1)
    makers = {
        "directory": odd.mkdir,
        "deep": lambda: odd.write_bytes(b"[" * 200_000),
        "fifo": lambda: os.mkfifo(odd),
        "bytes": lambda: odd.write_bytes(bytes(range(256))),
        "list": lambda: odd.write_text("[1]"),
    }
    makers[kind]()
    found = store.latest(said.append)
    assert found is not None
    assert found.tensors["model.weight"].unique().item() == 1.0
    assert len(said) == 1


def test_a_pickle_is_never_loaded(tmp_path):
    write_checkpoint(tmp_path / "step-1", sample())
    torch.save({"model.weight": torch.ones(1)}, tmp_path / "step-1.safetensors")
    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(tmp_path / "step-1")
