"""How long networks and their layers take, beside their multiply-accumulates and their dense twins.

A network and its twin are run in turns, so that what disturbs the machine for a moment disturbs both alike.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import StatisticsError, correlation, median

import torch
from torch import nn

from lowrank_cnn.method.counting import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.selection import check_module
from lowrank_cnn.models.network import Network
from lowrank_cnn.models.twins import dense_twin
from lowrank_cnn.system.clock import CudaMarks, Marks, Sample, measure, torch_threads
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes


@dataclass(frozen=True)
class LayerTime:
    """One layer: what it is, its multiply-accumulates for the batch, and its time inside a run of the network."""

    name: str
    type: str
    macs: int
    ms: float


@dataclass(frozen=True)
class Timing:
    """A network's time for one batch. `correlation` is Pearson's r of MACs and time over its layers.

    `twin` is the dense network that it is held against, timed in the same turns, where there is one.
    """

    name: str
    input: tuple[int, ...]
    runtime: str
    device: str
    threads: int
    macs: int
    total: Sample
    layers: tuple[LayerTime, ...]
    correlation: float | None
    twin: Timing | None = None

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


def time_model(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    *,
    batch: int = 1,
    device: str = "cpu",
    threads: int | None = None,
    runtime: str = "torch",
    repeats: int = 15,
    twin: nn.Module | None = None,
) -> Timing:
    """Time a network in evaluation (in torch: eager, channels_last), whole and by layer, beside its MACs.

    Our own networks are held against their family's dense baseline (see `dense_twin`) unless `twin` is given.
    `runtime` is "torch", or "onnx" for ONNX Runtime on the CPU; the time is the median of `repeats` runs.
    """
    from lowrank_cnn.train.fabric import resolve_device

    size = _checked(model, input_size, batch, device, runtime)
    device = "cpu" if runtime == "onnx" else resolve_device(device)
    twin = dense_twin(model) if twin is None else twin
    networks = {"network": model} | ({} if twin is None else {"twin": twin})
    prepare = _OnnxRunner if runtime == "onnx" else _TorchRunner
    with torch_threads(threads), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        runners = {key: prepare(net, (batch, *size), device, Path(folder) / key) for key, net in networks.items()}
        runs = {key: runner.run for key, runner in runners.items()}
        totals = measure(runs, repeats=repeats, cuda=device.startswith("cuda"))
        timed = {key: _timing(networks[key], runners[key], totals[key], runtime, device) for key in networks}
    return replace(timed["network"], twin=timed.get("twin"))


def pearson(layers: Sequence[LayerTime]) -> float | None:
    """Pearson's r between the MACs and the times of the layers that multiply; None for fewer than three."""
    rows = [row for row in layers if row.macs > 0]
    try:
        return correlation([row.macs for row in rows], [row.ms for row in rows]) if len(rows) > 2 else None
    except StatisticsError:  # layers all alike
        return None


def _checked(
    model: nn.Module, input_size: Sequence[int] | None, batch: int, device: str, runtime: str
) -> tuple[int, ...]:
    check_module(model)
    size = input_size or notes(model).input_size
    if size is None:
        raise LowRankError("say the size of the images (channels, height, width) that the network takes.")
    if runtime not in ("torch", "onnx"):
        raise LowRankError(f"the runtime is torch or onnx, not {runtime!r}.")
    if runtime == "onnx" and device not in ("cpu", "auto"):
        raise LowRankError(f"onnxruntime is timed on the CPU, not on {device}.")
    if batch < 1:
        raise LowRankError(f"the batch must be positive, not {batch}.")
    return tuple(size)


class _TorchRunner:
    """A copy of a network in evaluation, and the image it is run on, both in channels_last."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], device: str, scratch: Path) -> None:
        last = torch.channels_last
        self.network = copy.deepcopy(model).eval().to(device).to(memory_format=last)  # type: ignore[call-overload]
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self.image = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=last)
        self.clock = CudaMarks() if device.startswith("cuda") else Marks()

    def run(self) -> object:
        return self.network(self.image)

    def macs(self) -> dict[str, int]:
        return {row.name: row.macs for row in count(self.network, self.image.shape[1:]).layers}

    def layers(self, repeats: int = 7) -> dict[str, float]:
        """Milliseconds of each layer inside whole runs, by hooks: the median of several."""
        hooks = []
        for name, module in _timed(self.network):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.clock.start(name)))
            hooks.append(module.register_forward_hook(lambda *_, name=name: self.clock.stop(name)))
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            self.run()
            for name, ms in self.clock.collect().items():
                times[name].append(ms)
        for hook in hooks:
            hook.remove()
        return {name: median(taken) for name, taken in times.items()}


class _OnnxRunner:
    """A network in ONNX Runtime; its layers are the nodes of the graph."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], device: str, scratch: Path) -> None:
        from lowrank_cnn.deploy.exporting import export
        from lowrank_cnn.deploy.runtime import OnnxModel

        self.path = scratch.with_suffix(".onnx")
        export(model, self.path, input_size=shape[1:])
        self.make = lambda **options: OnnxModel(self.path, threads=torch.get_num_threads(), **options)
        self.network, self.image = self.make(), torch.randn(shape)

    def run(self) -> object:
        return self.network(self.image)

    def macs(self) -> dict[str, int]:
        from lowrank_cnn.deploy.engines.onnx import node_macs

        return node_macs(self.path)

    def layers(self, repeats: int = 7) -> dict[str, float]:
        """Milliseconds of each node, from the runtime's own profile: the median of several runs."""
        profiled = self.make(profile=self.path.with_suffix(""))
        for _ in range(repeats + 1):
            profiled(self.image)
        times: dict[str, list[float]] = defaultdict(list)
        for event in json.loads(Path(profiled.runner.session.end_profiling()).read_text()):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                name = event["name"].removesuffix("_kernel_time").removeprefix("fused ")
                times[name].append(event["dur"] / 1000)
        return {name: median(taken[1:]) for name, taken in times.items() if taken[1:]}


def _timed(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules that compute; a composite counts as one."""
    for name, module in network.named_modules():
        whole = isinstance(module, CompositeConv2d)
        inside = name.rpartition(".")[0]
        parent = network.get_submodule(inside) if inside else None
        if (whole or not module._modules) and not isinstance(parent, CompositeConv2d):
            yield name, module


def _timing(
    model: nn.Module, runner: _TorchRunner | _OnnxRunner, total: Sample, runtime: str, device: str
) -> Timing:
    shape = tuple(runner.image.shape)
    macs, times = runner.macs(), runner.layers()
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = tuple(
        LayerTime(name, types.get(name, ""), shape[0] * macs.get(name, 0), ms) for name, ms in times.items()
    )
    name = str(model.config["name"]) if isinstance(model, Network) else type(model).__name__
    whole = shape[0] * count(model, shape[1:]).macs
    return Timing(name, shape, runtime, device, torch.get_num_threads(), whole, total, layers, pearson(layers))
