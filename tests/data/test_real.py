"""A few hundred images of the real sets, in the layout in which users have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowrank_cnn.data import open_data


def test_cifar10_is_itself(real_data: Path) -> None:
    data = open_data(real_data / "cifar10", limit=500)
    assert data.classes[:4] == ("airplane", "automobile", "bird", "cat")
    assert len(data.classes) == 10
    assert data.train.size == (3, 32, 32)
    assert data.train.labels.bincount().tolist() == [50] * 10
    mean = data.train.images.double().mean((0, 2, 3))
    assert (mean - torch.tensor([125.307, 122.950, 113.865])).abs().max() < 6
    assert not data.train.problems


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
