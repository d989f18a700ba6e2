"""All that is kept between runs lies in one folder, which the user can choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.deploy.plan_cache import Cache
from lowrank_cnn.kernels.autotune.store import store_path
from lowrank_cnn.system.cache import cache_folder


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
    assert Cache.open(True).path == Path(folder) / "plans.json"
