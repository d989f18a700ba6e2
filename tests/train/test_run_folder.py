"""The folder of a run: records and checkpoints read back exactly, any damage is noticed, and what may change."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import Record, load_record
from lowrank_cnn.train.run_folder import (
    NOT_WRITTEN,
    Checkpoint,
    DamagedCheckpointError,
    RunDirectory,
    read_checkpoint,
    recipe_changes,
    write_checkpoint,
)

BOTH = pytest.mark.parametrize("suffix", [".json", ".safetensors"])
WHERE = st.floats(0, 1, exclude_max=True)


def sample(value: float = 1.0) -> Checkpoint:
    tensors = {
        "model.weight": torch.full((2, 3, 4, 4), value).contiguous(memory_format=torch.channels_last),
        "model.steps": torch.tensor(7),
        "random.0.torch": torch.get_rng_state(),
        "average.half": torch.tensor([value], dtype=torch.bfloat16),
    }
    return Checkpoint(tensors, {"epoch": 3, "rate": 0.1 + 0.2, "history": [{"loss": None}]})


def value_of(found: Checkpoint | None) -> float:
    assert found is not None
    return found.tensors["model.weight"].unique().item()


@pytest.fixture
def store(tmp_path: Path) -> RunDirectory:
    """Two checkpoints, of values 1 and 2."""
    store = RunDirectory(tmp_path)
    store.save(sample(1.0), 1)
    store.save(sample(2.0), 2)
    return store


@BOTH
@given(where=WHERE, bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_is_noticed(tmp_path, suffix, where, bit):
    write_checkpoint(tmp_path / "step-1", sample())
    path = tmp_path / f"step-1{suffix}"
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="step-1"):
        read_checkpoint(tmp_path / "step-1")


@BOTH
@given(kept=WHERE)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_is_noticed_and_the_one_before_used(tmp_path, suffix, kept):
    store, said = RunDirectory(tmp_path), []
    store.save(sample(1.0), 1)
    store.save(sample(2.0), 2)
    path = tmp_path / f"step-00000002{suffix}"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    assert value_of(store.latest(said.append)) == 1.0
    assert len(said) == 1
    assert path.name in said[0]


@pytest.mark.parametrize("kind", ["missing", "directory", "deep", "fifo", "bytes", "list", "pickle"])
def test_a_newest_pair_of_any_kind_is_passed_over(store, kind):
    manifest, tensors = (store.path / f"step-00000002{suffix}" for suffix in (".json", ".safetensors"))
    said: list[str] = []
    (tensors if kind in ("missing", "pickle") else manifest).unlink()
    makers = {
        "missing": lambda: None,
        "directory": manifest.mkdir,
        "deep": lambda: manifest.write_bytes(b"[" * 200_000),
        "fifo": lambda: os.mkfifo(manifest),
        "bytes": lambda: manifest.write_bytes(bytes(range(256))),
        "list": lambda: manifest.write_text("[1]"),
        "pickle": lambda: torch.save({"model.weight": torch.ones(1)}, tensors),
    }
    makers[kind]()
    assert value_of(store.latest(said.append)) == 1.0
    assert len(said) == 1


def stems(folder: Path) -> list[str]:
    return [path.stem for path in sorted(folder.glob("*.json"))]


def test_two_are_kept_and_one_best(tmp_path):
    store = RunDirectory(tmp_path)
    for iteration in (1, 5, 9):
        store.save(sample(), iteration)
        store.save(sample(), iteration, kind="best", keep=1)
    assert stems(tmp_path) == ["best-00000009", "step-00000005", "step-00000009"]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_pair_that_is_not_whole_pushes_out_no_other(tmp_path):
    store = RunDirectory(tmp_path)
    store.save(sample(1.0), 1)
    (tmp_path / "step-00000002.safetensors").write_bytes(b"killed here")
    store.save(sample(2.0), 8)
    assert stems(tmp_path) == ["step-00000001", "step-00000008"]
    (tmp_path / "step-00000008.json").write_text("spoilt")
    store.save(sample(3.0), 6)  # the run went back: its future is forgotten
    assert value_of(store.latest(pytest.fail)) == 3.0
    assert stems(tmp_path) == ["step-00000001", "step-00000006"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY, errno.EIO])
def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(store, monkeypatch, code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        store.save(sample(3.0), 3)
    assert value_of(store.latest(pytest.fail)) == 3.0
    store.save(sample(4.0), 4)
    assert len(list(store.path.glob("step-*"))) == 4


@pytest.mark.parametrize("suffixes", [(".json", ".safetensors"), (".safetensors",), (".json",)])
def test_best_weights_that_were_deleted_are_told_and_those_to_come_are_kept(driver, tmp_path, capsys, suffixes):
    driver.train(tmp_path, driver.PLAIN, epochs=2)
    for suffix in suffixes:
        next(tmp_path.glob(f"best-*{suffix}")).unlink()
    with pytest.raises(LowRankError, match="used without best=True") as refused:
        driver.load_best(tmp_path)
    assert "best-" in str(refused.value)
    driver.train(tmp_path, driver.PLAIN, epochs=3, resume=True, progress=True)
    assert "are gone from" in capsys.readouterr().out
    assert load_record(tmp_path).result["best_epoch"] == 3
    assert driver.load_best(tmp_path).classes == ("nw", "ne", "sw", "se")


RECIPE = lr.get_recipe("modern", ema=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 7),
        ("holdout", 0.5),
        ("preprocess", "whiten"),
        ("zca_epsilon", 0.5),
        ("resize", 9),
        ("crop", 9),
        ("ema", 0.5),
        ("norm", None),
        ("pool", "average"),
        ("lookahead", 5),
        ("whiten_first", True),
        ("alternate_mirror", True),
        ("optimizer", "adamw"),
        ("freeze", "features.*"),
    ],
)
def test_what_the_saved_state_depends_on_is_fixed(field, value):
    with pytest.raises(LowRankError, match=f"started with {field}="):
        recipe_changes(RECIPE.to_dict(), lr.get_recipe("modern", **{"ema": 0.0, field: value}))


def test_the_rest_may_change_and_is_told():
    saved = RECIPE.to_dict()
    assert recipe_changes(saved, lr.get_recipe("modern", ema=0.0, lr=0.5)) == {"lr": (0.1, 0.5)}
    del saved["pool"]  # as in a checkpoint from before there was one
    assert recipe_changes(saved, RECIPE) == {}


def record() -> Record:
    return Record({"name": "nin"}, {"lr": 0.1}, {"name": "digits"}, 3, "test", "fp32", "cpu")


def stored() -> dict:
    """As records were stored before they were sealed."""
    return {name: value for name, value in dataclasses.asdict(record()).items() if name not in NOT_WRITTEN}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("record") / "record.json"
    record().save(path)
    return path, path.read_bytes()


@given(where=WHERE, bit=st.integers(0, 7))
@settings(max_examples=300)
def test_a_flipped_bit_is_noticed_or_changes_nothing(written, where, bit):
    path, content = written
    flipped = bytearray(content)
    flipped[int(where * len(flipped))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        found = load_record(path)
    except LowRankError:
        return
    assert dataclasses.replace(found, environment=record().environment) == record()


def test_a_changed_record_says_how_to_use_it_all_the_same(tmp_path):
    path = tmp_path / "record.json"
    record().save(path)
    values = json.loads(path.read_text()) | {"seed": 4}
    path.write_text(json.dumps(values))
    with pytest.raises(LowRankError, match=r"damaged or was edited.*delete its field sha256"):
        load_record(path)
    del values["sha256"], values["begun_from"]  # which older records lack
    path.write_text(json.dumps(values))
    found = load_record(path)
    assert (found.seed, found.begun_from) == (4, "")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"kind": "timing"}, "not the record of a training run"),
        ({"schema": 99}, "schema 99"),
        ({"surprise": 1}, "surprise missing or unknown"),
        ({"status": "lost"}, "status 'lost'"),
        ({"model": "nin"}, "model is not"),
        ({"seed": "3"}, "seed is not"),
        ({"history": {}}, "history is not"),
        ({"result": None}, "result is not"),
        ("", "not the record"),
        ("[1]", "not the record"),
        ("{", "not the record"),
        (None, "no record"),
    ],
)
def test_foreign_records_are_refused(tmp_path, content, sentence):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(stored() | content)
        (tmp_path / "record.json").write_text(text)
    with pytest.raises(LowRankError, match=sentence):
        load_record(tmp_path)
