from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.data.parquet import is_repository


@pytest.mark.parametrize("name", ["cifar10", "a/b/c", "./a", "../a", "/a/b", "~/a", "a b/c", "a/", ".hidden/a"])
def test_paths_are_no_repository_names(name: str) -> None:
    assert not is_repository(name)
    assert is_repository("a.b/c_d")


@pytest.mark.parametrize(
    ("repository", "patterns"),
    [
        ("uoft-cs/cifar10", ["*.parquet"]),
        ("ILSVRC/imagenet-1k", ["data/train-*.parquet", "data/validation-*.parquet"]),
    ],
)
def test_shards_are_fetched_and_read(repository, patterns, tmp_path, write_shards, monkeypatch) -> None:
    def fetch(name: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        assert (name, repo_type, allow_patterns) == (repository, "dataset", patterns)
        for split in ("train", "validation"):
            write_shards(tmp_path / "data", split, [[(0, 0), (1, 2)]], columns=("img", "label"))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    data = open_data(repository)
    assert data.name == repository
    assert data.train.labels.tolist() == [0, 2]


@pytest.mark.parametrize("error", [OSError("no route to host.\nmany\nlines"), RuntimeError("")])
def test_a_failure_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LowRankError) as caught:
        open_data("uoft-cs/cifar10")
    sentence = str(caught.value)
    assert sentence.startswith("uoft-cs/cifar10 is no local folder and cannot be fetched from the Hub (")
    assert "\n" not in sentence
    assert (str(error).partition(".")[0] or "RuntimeError") in sentence


def test_offline_without_a_cached_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real huggingface_hub, told that there is no network."""
    real = huggingface_hub.snapshot_download

    def offline(*arguments: str, **options: object) -> str:
        return real(*arguments, **options, local_files_only=True, cache_dir=tmp_path)  # pyright: ignore

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(LowRankError, match=r"cannot be fetched from the Hub \(.+\): check its name, the network"):
        open_data("nobody/nothing")


def test_a_mistyped_local_path_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "photos" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(LowRankError, match=r"^there is no folder photos/trian; did you mean train\?"):
        open_data("photos/trian")
