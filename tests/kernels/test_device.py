"""How to choose between kernels and torch, and whether kernels run on a device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import kernels_take
from lowrank_cnn.kernels import device, for_graphs, forced, torch_compile
from lowrank_cnn.kernels.device import survey, surveying
from tests.kernels.helpers import DEVICE, channels_last

CPU = torch.device("cpu")


def test_a_block_goes_before_the_environment(monkeypatch):
    monkeypatch.delenv("LOWRANK_KERNELS", raising=False)
    assert device.mode() == "auto"
    monkeypatch.setenv("LOWRANK_KERNELS", "off")
    found = {}
    for chosen in device.MODES:
        with forced(chosen):
            assert device.mode() == chosen
            found[chosen] = device.by_torch()
    assert found == {"off": True, "dense": True, "on": False, "auto": False}
    assert device.mode() == "off"
    monkeypatch.setenv("LOWRANK_KERNELS", "fast")
    with pytest.raises(LowRankError, match="LOWRANK_KERNELS is off, dense, on, auto, not 'fast'"):
        device.mode()
    with pytest.raises(LowRankError, match="LOWRANK_KERNELS"):
        forced("fast")


def test_a_survey_collects_and_is_ignored_by_what_torch_compile_traces(monkeypatch):
    monkeypatch.setattr(device, "_able", lambda _: True)
    monkeypatch.setattr(torch_compile.choice, "plan_text", lambda *_: survey() is None)
    asked = ((1, 2, 3, 4), torch.float32, torch.device("cuda"))
    assert survey() is None
    with forced("on"), surveying() as noted:
        survey().append(1)
        assert torch_compile.plan_text()
        assert torch_compile.takes(*asked)
        assert not device.takes(*asked)
    assert noted == [1]
    assert not torch_compile.exporting()


def test_another_thread_can_take_the_settings_along(monkeypatch):
    monkeypatch.delenv("LOWRANK_KERNELS", raising=False)
    found = []

    def run(settings):
        found.append((device.mode(), device.is_for_graphs()))
        with settings:
            found.append((device.mode(), device.is_for_graphs()))

    with forced("off"), for_graphs():
        thread = threading.Thread(target=run, args=(device.as_now(),))
        thread.start()
        thread.join()
    assert found == [("auto", False), ("off", True)]


def test_kernels_run_where_they_are_wanted():
    pytest.importorskip("triton")
    assert not device.kernels_run(CPU)  # the interpreter is for tests that ask for it
    with forced("on"):
        assert device.kernels_run(DEVICE)
        assert kernels_take(torch.empty(1, 2, 3, 4, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, 4, dtype=torch.float64, device=DEVICE))
        with surveying():
            assert not device.kernels_run(DEVICE)
    with forced("off"):
        assert not device.kernels_run(torch.device("cuda"))


@pytest.mark.parametrize(
    ("error", "known"),
    [(RuntimeError("Failed to find C compiler."), [False]), (torch.OutOfMemoryError("CUDA out of memory."), [])],
)
def test_where_triton_cannot_build_torch_runs(monkeypatch, error, known):
    """It is asked again where memory ran out."""
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.between import batch_statistics

    def fails(*_):
        raise error

    monkeypatch.setattr(batch_statistics, "batch_norm_statistics", fails)
    monkeypatch.setattr(device, "_ABLE", {})
    chain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)
    x = channels_last(torch.randn(2, 8, 4, 4, device=DEVICE))
    with forced("on"):
        assert torch.equal(fuse(chain)(x), chain(x))
    assert list(device._ABLE.values()) == known


class Kernel:
    def __getitem__(self, grid):
        return lambda *arguments: ("launched", grid, arguments)

    def warmup(self, *arguments, grid):
        return "compiled", grid, arguments


def test_launches_on_the_device_of_a_tensor_or_only_compiled(monkeypatch):
    assert (device.capability_of(CPU), device.multiprocessors(CPU)) == ((0, 0), 2)
    assert device.start(Kernel(), (3,))(1, 2) == ("launched", (3,), (1, 2))
    with device.compiling_ahead():
        assert device.start(Kernel(), (3,))(1, 2) == ("compiled", (3,), (1, 2))
    devices, x = [], torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: devices.append(tensor) or torch.no_grad())
    assert device.on_its_device(lambda count, tensor: count)(3, x) == 3
    assert devices[0] is x
