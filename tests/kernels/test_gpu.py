"""What is known of the device before a kernel is launched on it."""

from __future__ import annotations

import torch

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.device import compiling_ahead

CPU = torch.device("cpu")


def test_a_cpu_has_no_capability_and_two_multiprocessors():
    assert gpu.capability_of(CPU) == (0, 0)
    assert gpu.multiprocessors(CPU) == 2


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
