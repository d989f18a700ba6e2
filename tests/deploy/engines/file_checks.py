"""Compare a written file with its network in float64."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import difference
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export


def assert_file_computes_the_same(network: nn.Module, image: Tensor, path: Path) -> None:
    """Export a network that gives named outputs, and compare each of them as the engine computes it."""
    export(network, path, example_input=image, dynamic=())
    given = open_engine(path)(image.numpy())
    with torch.no_grad():
        expected = network.double()(image.double())
    errors = {name: difference(torch.from_numpy(given[name]).double(), right) for name, right in expected.items()}
    assert all(error < 1e-6 for error in errors.values()), errors
