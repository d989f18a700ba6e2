"""What is known of the device before a kernel is launched on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.kernels import forced, gpu
from lowrank_cnn.kernels.fusing import fuse
from lowrank_cnn.kernels.mode import compiling_ahead, surveying

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")


def test_a_cpu_has_no_capability_and_two_multiprocessors():
    assert gpu.capability_of(CPU) == (0, 0)
    assert gpu.multiprocessors(CPU) == 2


def test_kernels_run_where_they_are_wanted():
    pytest.importorskip("triton")
    assert not gpu.kernels_run(CPU)  # the interpreter is for tests that ask for it
    with forced("on"):
        assert gpu.kernels_run(CPU)
        assert gpu.kernels_take(torch.empty(1, 2, 3, 4))
        assert not gpu.kernels_take(torch.empty(1, 2, 3))
        assert not gpu.kernels_take(torch.empty(1, 2, 3, 4, dtype=torch.float64))
        with surveying():
            assert not gpu.kernels_run(CPU)
    with forced("off"):
        assert not gpu.kernels_run(torch.device("cuda"))


class Kernel:
    def __getitem__(self, grid):
        return lambda *arguments: ("launched", grid, arguments)

    def warmup(self, *arguments, grid):
        return "compiled", grid, arguments


def test_a_kernel_is_started_or_only_compiled():
    assert gpu.start(Kernel(), (3,))(1, 2) == ("launched", (3,), (1, 2))
    with compiling_ahead():
        assert gpu.start(Kernel(), (3,))(1, 2) == ("compiled", (3,), (1, 2))


def test_a_launcher_runs_on_the_device_of_its_tensor(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: devices.append(tensor) or torch.no_grad())
    x = torch.zeros(1)
    assert gpu.on_its_device(lambda count, tensor: count)(3, x) == 3
    assert devices[0] is x


def test_where_triton_cannot_build_torch_runs(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.between import batch_statistics

    def fails(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(batch_statistics, "batch_norm_statistics", fails)
    monkeypatch.setattr(gpu, "_ABLE", {})
    chain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)
    x = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with forced("on"):
        assert torch.equal(fuse(chain)(x), chain(x))
    assert list(gpu._ABLE.values()) == [False]


def test_triton_is_asked_again_where_memory_ran_out(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.between import batch_statistics

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(batch_statistics, "batch_norm_statistics", fails)
    monkeypatch.setattr(gpu, "_ABLE", {})
    assert not gpu._able(torch.device("cpu"))
    assert gpu._ABLE == {}
