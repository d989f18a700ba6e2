"""A few hundred images of the real sets, in the layout in which users have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowrank_cnn.data import Augment, ResidentSplit, fit_preprocess, make_loader, open_data


def test_cifar10_is_itself(real_data: Path) -> None:
    data = open_data(real_data / "cifar10", limit=500)
    assert data.classes[:4] == ("airplane", "automobile", "bird", "cat")
    assert len(data.classes) == 10
    assert data.train.size == (3, 32, 32)
    assert data.train.labels.bincount().tolist() == [50] * 10
    mean = data.train.images.double().mean((0, 2, 3))
    assert (mean - torch.tensor([125.307, 122.950, 113.865])).abs().max() < 6
    assert not data.train.problems


def test_cifar10_whitened_and_cropped(real_data: Path) -> None:
    data = open_data(real_data / "cifar10", limit=300, image_size=8)
    whiten = fit_preprocess("whiten", data.train, epsilon=1e-3)
    made = make_loader(
        data.train, batch_size=100, preprocess=whiten, augment=Augment(crop=6), seed=0, device="cpu", train=True
    )
    images = torch.cat([images for images, _ in made.epoch(0)])
    assert images.shape == (300, 3, 6, 6)
    assert images.mean().abs() < 0.05
    neighbours = (images[..., :-1] * images[..., 1:]).mean() / (images**2).mean()
    assert neighbours.abs() < 0.1  # in photographs this correlation is about 0.9


def test_tiny_imagenet_has_grey_jpegs_that_become_rgb(real_data: Path) -> None:
    folder = real_data / "tiny-imagenet-100"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    data = open_data(folder, limit=400)
    assert len(data.classes) == 100
    assert data.classes[0] == "goldfish"
    assert data.train.size == (3, 64, 64)
    assert data.train.labels.bincount().tolist() == [4] * 100
    images = data.train.images
    grey = (images[:, 0] == images[:, 1]).flatten(1).all(1) & (images[:, 1] == images[:, 2]).flatten(1).all(1)
    assert 0 < grey.sum() < 40
    assert not data.train.problems


def test_a_stream_of_real_shards_equals_memory(real_data: Path) -> None:
    source = real_data / "cifar10"
    held, stream = (open_data(source, limit=200, resident_bytes=size).test for size in (2**31, 0))
    assert isinstance(held, ResidentSplit)
    options: dict = {"batch_size": 64, "preprocess": None, "augment": Augment(crop=28), "seed": 0, "device": "cpu"}
    for (images, labels), (images2, labels2) in zip(
        make_loader(held, train=False, **options).epoch(0),
        make_loader(stream, train=False, workers=2, **options).epoch(0),
        strict=True,
    ):
        assert torch.equal(images, images2)
        assert torch.equal(labels, labels2)
