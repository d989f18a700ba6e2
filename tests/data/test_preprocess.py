"""Preprocessing, and the fingerprint of a data set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import (
    Data,
    ResidentSplit,
    Standardize,
    Whiten,
    fit_preprocess,
    open_data,
    preprocess,
    preprocess_from_dict,
)
from lowrank_cnn.data.preprocess import AsGiven, normalise_contrast
from lowrank_cnn.data.store import fingerprint_of_files
from lowrank_cnn.data.types import generator


@pytest.fixture(scope="module")
def images() -> Tensor:
    """600 smooth colour images of 5x5: neighbours are correlated, as in photographs."""
    noise = torch.rand(600, 3, 9, 9, generator=generator("noise"))
    smooth = torch.nn.functional.avg_pool2d(noise, 5, stride=1)
    return ((smooth - smooth.min()) / (smooth.max() - smooth.min()) * 255).round().to(torch.uint8)


@pytest.fixture(scope="module")
def split(images: Tensor) -> ResidentSplit:
    return ResidentSplit.of(images, torch.zeros(len(images), dtype=torch.int64))


def reference(images: Tensor, scale: float, epsilon: float) -> np.ndarray:
    """Contrast normalisation and ZCA in numpy and double precision, by their definitions."""
    flat = images.flatten(1).numpy().astype(np.float64)
    flat = flat - flat.mean(1, keepdims=True)
    flat = scale * flat / np.sqrt((flat**2).sum(1, keepdims=True))
    centred = flat - flat.mean(0)
    covariance = centred.T @ centred / len(centred)
    values, vectors = np.linalg.eigh(covariance + epsilon * np.eye(len(covariance)))
    return (centred @ (vectors @ np.diag(values**-0.5) @ vectors.T)).reshape(images.shape)


@pytest.mark.parametrize(("scale", "epsilon"), [(55.0, 0.1), (55.0, 1e-3), (1.0, 1e-4)])
def test_whitening_equals_its_definition(split: ResidentSplit, scale: float, epsilon: float) -> None:
    whiten = Whiten.fit(split, scale=scale, epsilon=epsilon)
    ours = whiten(split.images)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), reference(split.images, scale, epsilon), rtol=2e-4, atol=2e-4)


def test_constant_images_and_zero_epsilon_stay_finite() -> None:
    grey = torch.full((20, 1, 3, 3), 7, dtype=torch.uint8)
    grey[:10] = torch.randint(0, 256, (10, 1, 3, 3), generator=generator(0)).to(torch.uint8)
    split = ResidentSplit.of(grey, torch.zeros(20, dtype=torch.int64))
    whiten = Whiten.fit(split, epsilon=0.0)
    assert whiten(grey).isfinite().all()
    flat = normalise_contrast(grey.flatten(1).float(), scale=55.0)
    assert torch.equal(flat[10:], torch.zeros(10, 9))
    assert torch.allclose(flat[:10].norm(dim=1), torch.tensor(55.0))


def test_standardised_images_have_no_mean_and_unit_deviation(split: ResidentSplit) -> None:
    standardize = Standardize.fit(split)
    values = split.images.double()
    assert torch.allclose(standardize.mean.double(), values.mean((0, 2, 3)))
    assert torch.allclose(standardize.std.double(), values.std((0, 2, 3), correction=0))
    ready = standardize(split.images)
    assert torch.allclose(ready.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(ready.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_statistics_do_not_depend_on_how_images_are_divided(split: ResidentSplit, monkeypatch) -> None:
    whole = Standardize.fit(split)
    monkeypatch.setattr(preprocess, "_VALUES_AT_ONCE", 3 * split.images[0].numel())
    parts = Standardize.fit(split)
    assert torch.equal(whole.mean, parts.mean)
    assert torch.equal(whole.std, parts.std)
    constant = ResidentSplit.of(torch.full((4, 1, 2, 2), 9, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(Standardize.fit(constant)(constant.images), torch.zeros(4, 1, 2, 2))


@pytest.mark.parametrize("name", ["standardize", "whiten"])
def test_preprocessing_comes_back_from_a_checkpoint(name: str, split: ResidentSplit) -> None:
    fitted = fit_preprocess(name, split, epsilon=0.05)
    stored = fitted.to_dict()
    assert all(isinstance(value, Tensor) for value in stored.values())
    again = preprocess_from_dict(stored)
    assert type(again) is type(fitted)
    assert torch.equal(again(split.images), fitted(split.images))
    assert again.to_dict().keys() == stored.keys()


def test_clear_refusals(split: ResidentSplit) -> None:
    large = ResidentSplit.of(torch.zeros(1, 3, 128, 128, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    image = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    for call, says in (
        (lambda: fit_preprocess("whitten", split), "preprocess must be standardize or whiten, not 'whitten'"),
        (lambda: Whiten.fit(split, epsilon=-1.0), "epsilon must be a number of at least 0"),
        (lambda: Whiten.fit(split, scale=0.0), "scale must be a number above 0"),
        (lambda: Whiten.fit(large), "values of an image must be a number at most 16,384, not 49,152"),
        (lambda: preprocess_from_dict({"mean": torch.zeros(3)}), "no preprocessing is stored as mean"),
        (lambda: Standardize(torch.zeros(3), torch.ones(3))(image), "1 channel do not fit a mean of 3"),
        (lambda: Whiten(torch.zeros(75), torch.eye(75))(image), "4 values do not fit whitening of 75"),
        (lambda: preprocess_from_dict(AsGiven().to_dict())(image), "tensors that your own code prepared"),
    ):
        with pytest.raises(LowRankError, match=says):
            call()


def _photos(root: Path, write_folder, photo, *, first: int = 0) -> Path:
    names = [f"{split}/{name}/{n}.png" for split in ("train", "val") for name in ("cat", "dog") for n in range(3)]
    return write_folder(root, {name: photo(first + number, format="BMP") for number, name in enumerate(names)})


def test_a_copy_elsewhere_is_the_same_set(tmp_path: Path, write_folder, photo) -> None:
    one = _photos(tmp_path / "one", write_folder, photo)
    shutil.copytree(one, tmp_path / "other")
    streamed = open_data(tmp_path / "other", resident_bytes=0)
    assert open_data(one).digest == open_data(tmp_path / "other", image_size=4).digest == streamed.digest


def test_replaced_images_of_equal_file_size_are_another_set(tmp_path: Path, write_folder, photo) -> None:
    before = open_data(_photos(tmp_path, write_folder, photo)).digest
    sizes = sorted(path.stat().st_size for path in tmp_path.rglob("*.png"))
    after = open_data(_photos(tmp_path, write_folder, photo, first=50)).digest
    assert sizes == sorted(path.stat().st_size for path in tmp_path.rglob("*.png"))
    assert before != after


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_an_image_that_turns_into_a_pipe_is_unreadable_and_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"image")
    before = fingerprint_of_files(tmp_path, [tmp_path / "a.png"])
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    assert fingerprint_of_files(tmp_path, [tmp_path / "a.png"]) != before


def test_names_classes_and_chosen_images_count(tmp_path: Path, write_folder, photo) -> None:
    data = open_data(_photos(tmp_path / "photos", write_folder, photo), image_size=8)
    others = {open_data(tmp_path / "photos", limit=4).digest, data.holdout(2, seed=0).digest}
    (tmp_path / "photos/train/cat/0.png").rename(tmp_path / "photos/train/cat/zero.png")
    others.add(open_data(tmp_path / "photos").digest)
    assert len(others | {data.digest}) == 4


def test_shards_have_a_fingerprint(shards: Path, tmp_path: Path, write_shards, photo) -> None:
    before = open_data(shards).digest
    assert before == open_data(shards, resident_bytes=0).digest
    write_shards(shards, "test", [[(photo(200 + number), number % 3) for number in range(10)]])
    assert before != open_data(shards).digest


def test_tensors_are_known_by_their_pixels_and_labels() -> None:
    def digest(pixel: int, label: int) -> str:
        images, labels = torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
        images[3, 0, 1, 1], labels[5] = pixel, label
        return Data("set", ("a", "b"), split := ResidentSplit.of(images, labels), split).digest

    assert digest(0, 0) == digest(0, 0)
    assert len({digest(0, 0), digest(1, 0), digest(0, 1)}) == 3
