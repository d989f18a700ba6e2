"""Where kernels run, and CUDA graphs that replay what was recorded."""

from __future__ import annotations

import contextlib
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import kernels_take
from lowrank_cnn.kernels import cuda_graph as module
from lowrank_cnn.kernels import device, forced, torch_compile
from lowrank_cnn.kernels.cuda_graph import captured, recorded
from lowrank_cnn.kernels.device import survey, surveying
from tests.kernels.helpers import DEVICE, channels_last

IMAGES = torch.randn(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LAST = torch.channels_last


class Stream:
    """A CUDA stream that takes down for which others it waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x + 1, {"twice": 2 * x}


class Graph:
    """What a CUDA graph does, without one: the run again, into the same memory."""

    def __init__(self, run) -> None:
        self.run = run
        run()

    def replay(self) -> None:
        [kept] = (cell.cell_contents for cell in self.run.__closure__ if isinstance(cell.cell_contents, dict))
        output = kept["output"]
        self.run()
        for target, value in zip(*map(torch.utils._pytree.tree_leaves, (output, kept["output"])), strict=True):
            target.copy_(value)
        kept["output"] = output


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "captured", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_results_follow_the_input_and_stay(host):
    run = recorded(Two(), IMAGES[0])
    first, second = run(IMAGES[1]), run(IMAGES[2])
    for (ours, more), x in zip((first, second), IMAGES[1:], strict=True):
        assert torch.equal(ours, x + 1)
        assert torch.equal(more["twice"], 2 * x)


def test_made_in_inference_mode_it_runs_outside(host):
    with torch.inference_mode():
        run = recorded(Two(), IMAGES[0].clone())
    assert torch.equal(run(IMAGES[1])[0], IMAGES[1] + 1)


def test_what_does_not_follow_its_input_is_refused(host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    with pytest.raises(LowRankError, match="ignores its input"):
        recorded(Two(), IMAGES[0])


def test_other_inputs_and_tracers_are_not_taken(host, monkeypatch: pytest.MonkeyPatch):
    run = recorded(Two(), IMAGES[0])
    assert run.takes(IMAGES[1])
    assert run.takes(IMAGES[1].contiguous(memory_format=LAST))
    assert not run.takes(IMAGES[1][:1])
    assert not run.takes(IMAGES[1].double())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not run.takes(IMAGES[1])


def test_a_call_waits_for_the_stream_of_the_last_one(host, monkeypatch: pytest.MonkeyPatch):
    run, first, second = recorded(Two(), IMAGES[0]), Stream(), Stream()
    for stream in (first, first, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, now=stream: now)
        run(IMAGES[1])
    assert first.waited[1:] == [second]
    assert second.waited == [first]


def test_the_weights_live_as_long_as_the_graph(host):
    network = Two()
    alive, run = weakref.ref(network), recorded(network, IMAGES[0])
    del network
    gc.collect()
    assert alive() is not None
    del run
    gc.collect()
    assert alive() is None


def test_a_replay_alone_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch):
    for name in ("CUDAGraph", "synchronize", "current_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(module, "_stream", lambda _: Stream())
    network = Two()
    alive, replay = weakref.ref(network), captured(lambda network=network: network(IMAGES[0])).replay
    del network
    gc.collect()
    replay()
    assert alive() is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    images = IMAGES.cuda()
    run = recorded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Two()).cuda(), images[0])
    first, second = run(images[1]), run(images[2])
    assert not torch.equal(first[0], second[0])
    assert torch.equal(run(images[1])[0], first[0])


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


def test_kernels_run_where_they_are_wanted(monkeypatch):
    pytest.importorskip("triton")
    assert not device.kernels_run(CPU)  # the interpreter is for tests that ask for it
    with forced("on"):
        assert device.kernels_run(DEVICE)
        assert kernels_take(torch.empty(1, 2, 3, 4, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, device=DEVICE))
        assert not kernels_take(torch.empty(1, 2, 3, 4, dtype=torch.float64, device=DEVICE))
        with surveying():
            assert not device.kernels_run(DEVICE)
    monkeypatch.setattr(device, "_able", lambda _: True)
    for mode, wanted in {"off": (False, False), "dense": (False, True)}.items():
        with forced(mode):  # nothing is timed for depthwise layers
            assert (
                tuple(device.kernels_run(torch.device("cuda"), depthwise=own) for own in (False, True)) == wanted
            )


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
