"""Caches lie in one folder, which the user can choose, and a file that is not whole counts as empty."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowrank_cnn.core.cache import JsonCache, cache_folder
from lowrank_cnn.deploy.plan import open_times
from lowrank_cnn.kernels.autotune.tuned import store_path


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"LOWRANK_CACHE": "mine", "XDG_CACHE_HOME": "all"}, "mine"),
        ({"XDG_CACHE_HOME": "all"}, "all/lowrank-cnn"),
        ({"LOWRANK_CACHE": "", "XDG_CACHE_HOME": ""}, "home/.cache/lowrank-cnn"),
        ({}, "home/.cache/lowrank-cnn"),
    ],
)
def test_one_folder_for_all(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOWRANK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert cache_folder() == store_path().parent == Path(folder)
    assert open_times(True).path == Path(folder) / "plans.json"


def numbers(path: Path | None) -> JsonCache:
    return JsonCache(path, key="numbers", valid=lambda entry: isinstance(entry, int))


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_counts_as_empty(tmp_path, where, bit):
    path = tmp_path / "numbers.json"
    path.unlink(missing_ok=True)
    cache = numbers(path)
    cache["a"] = 1
    assert cache.save()
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    assert numbers(path).entries == {}


def test_keys_tell_files_apart(tmp_path):
    cache = numbers(tmp_path / "file")
    cache["a"] = 1
    cache.save()
    assert JsonCache(tmp_path / "file", key="other", valid=bool).entries == {}


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b"[" * 200_000, b'{"a": 1}\n{}', b'["x"]\n', b'{"format": []}\n']
)
def test_foreign_files_count_as_empty_and_are_replaced(tmp_path, content):
    path = tmp_path / "numbers.json"
    path.write_bytes(content)
    cache = numbers(path)
    assert cache.entries == {}
    cache["a"] = 1
    assert cache.save()
    assert numbers(path).entries == {"a": 1}


def test_processes_keep_what_others_have_stored(tmp_path):
    one, other, nowhere = numbers(tmp_path / "file"), numbers(tmp_path / "file"), numbers(None)
    one["a"], other["b"], nowhere["c"] = 1, 2, 3
    assert all([one.save(), other.save(), nowhere.save()])
    assert numbers(tmp_path / "file").entries == {"a": 1, "b": 2}


@pytest.mark.parametrize("obstacle", ["directory", "file above", "fifo", "null"])
def test_a_cache_that_cannot_be_used_stops_nothing(tmp_path, obstacle):
    path = tmp_path / "numbers.json"
    if obstacle == "directory":
        (path / "below").mkdir(parents=True)
    elif obstacle == "file above":
        path.write_text("")
        path = path / "below"
    elif obstacle == "fifo":
        os.mkfifo(path)
    else:
        path = Path("a\0b")
    cache = numbers(path)
    cache["a"] = 1
    assert cache.get("a") == 1
    assert not cache.save()
