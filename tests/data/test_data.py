"""The two doors of the room: `open_data` opens a source, `make_loader` finds the loader of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Augment, ResidentLoader, Split, StreamedLoader, make_loader, open_data
from lowrank_cnn.data import preprocess_from_dict as from_dict
from lowrank_cnn.data.own import DatasetLoader, DatasetSplit
from lowrank_cnn.data.preprocess import AsGiven, fit_preprocess


def loader(split: Split, **options: Any) -> Any:
    plain = {"batch_size": 4, "preprocess": None, "augment": Augment(), "seed": 0, "device": "cpu", "train": False}
    return make_loader(split, **{**plain, **options})


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", limit=16, progress=False)


def test_each_kind_of_split_has_its_loader(digits, shards: Path):
    preprocess = fit_preprocess("standardize", digits.train)
    assert isinstance(loader(digits.train, preprocess=preprocess), ResidentLoader)
    images = open_data(shards, resident_bytes=0, progress=False)
    assert isinstance(loader(images.train, preprocess=fit_preprocess("standardize", images.train)), StreamedLoader)
    own = DatasetSplit(TensorDataset(torch.zeros(8, 3, 4, 4), torch.arange(8) % 2))
    assert isinstance(loader(own), DatasetLoader)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": -1}, "0 or more processes, up to 1024, not -1"),
        ({"decode": "tpu"}, "by cpu or gpu, not tpu"),
        ({"decode": "gpu"}, "is for streamed sets"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(digits, options: dict[str, Any], says: str):
    with pytest.raises(LowRankError, match=says):
        loader(digits.train, **options)


def test_a_split_of_another_kind_is_refused():
    with pytest.raises(LowRankError, match="no loader is known for a object"):
        loader(object())  # type: ignore[arg-type]


def test_a_stored_preprocessing_is_read_back(digits):
    fitted = fit_preprocess("standardize", digits.train)
    again = from_dict(fitted.to_dict())
    assert all(torch.equal(again.to_dict()[name], tensor) for name, tensor in fitted.to_dict().items())
    assert isinstance(from_dict(AsGiven().to_dict()), AsGiven)
