"""Kernels run where they are wanted and Triton can build them; elsewhere torch runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import kernels_take
from lowrank_cnn.kernels import device as availability
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.device import surveying

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")


def test_kernels_run_where_they_are_wanted():
    pytest.importorskip("triton")
    assert not availability.kernels_run(CPU)  # the interpreter is for tests that ask for it
    with forced("on"):
        assert availability.kernels_run(torch.device(DEVICE))
        assert kernels_take(torch.empty(1, 2, 3, 4, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, 4, dtype=torch.float64, device=DEVICE))
        with surveying():
            assert not availability.kernels_run(torch.device(DEVICE))
    with forced("off"):
        assert not availability.kernels_run(torch.device("cuda"))


def test_where_triton_cannot_build_torch_runs(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.between import batch_statistics

    def fails(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(batch_statistics, "batch_norm_statistics", fails)
    monkeypatch.setattr(availability, "_ABLE", {})
    chain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)
    x = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with forced("on"):
        assert torch.equal(fuse(chain)(x), chain(x))
    assert list(availability._ABLE.values()) == [False]


def test_triton_is_asked_again_where_memory_ran_out(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.between import batch_statistics

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(batch_statistics, "batch_norm_statistics", fails)
    monkeypatch.setattr(availability, "_ABLE", {})
    assert not availability._able(torch.device("cpu"))
    assert availability._ABLE == {}
