"""A tiny network, and one check that every engine passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.engines.targets import TARGETS, open_engine, usage
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.method.schemes import build_conv

SIZE = (3, 12, 12)


@pytest.fixture
def tiny() -> nn.Module:
    """A low-rank layer, a pool, a dense layer and a classifier."""
    torch.manual_seed(0)
    layers = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


@pytest.fixture
def check_target(tiny: nn.Module, tmp_path: Path, monkeypatch) -> Callable[[str, str], Path]:
    """Write the tiny network for a target, run the file, also as a module and by the printed snippet, compare."""

    def check(name: str, precision: str) -> Path:
        target = TARGETS[name]
        if not target.installed:
            pytest.skip(f"{target.package} is not installed")
        path, limit = tmp_path / f"net{target.suffix}", 1e-4 if precision == "fp32" else 0.05
        how = {"precision": precision, "strips": target.strips}
        written = export(tiny, path, input_size=SIZE, **how)  # type: ignore[arg-type]
        assert written.error is not None
        assert written.error < limit
        images = torch.randn(3, *SIZE)
        expected = tiny(images).detach().numpy()
        given = open_engine(path, trusted=True, threads=1)(images.numpy())["output"]
        np.testing.assert_allclose(given, expected, atol=limit, rtol=limit)
        loaded = load(path, trusted=True)
        assert isinstance(loaded, nn.Module)
        np.testing.assert_allclose(loaded(images).detach().numpy(), expected, atol=limit, rtol=limit)
        monkeypatch.chdir(tmp_path)
        scope: dict[str, object] = {}
        exec(usage(open_engine(path, trusted=True), path.name, precision=precision), scope)
        expected = tiny(torch.as_tensor(scope["images"])).detach().numpy()
        np.testing.assert_allclose(np.asarray(scope["logits"]).reshape(1, -1), expected, atol=limit)
        return path

    return check
