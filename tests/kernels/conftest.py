"""The model of a Hopper GPU, for the tests of its kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import hopper_model


@pytest.fixture
def hopper(monkeypatch):
    """The Gluon kernels over a model of the hardware."""
    if torch.cuda.is_available():
        pytest.skip("the model of the hardware runs on the host")
    return hopper_model.emulate(monkeypatch)
