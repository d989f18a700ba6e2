"""How long networks and their layers take, beside their multiply-accumulates and their dense twins.

A network and its twin are run in turns, so that what disturbs the machine for a moment disturbs both alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from lowrank_cnn.deploy.timed_runs import FileRunner, TorchRunner
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.inputs import InputSize, checked_size, is_example
from lowrank_cnn.method.selection import check_module
from lowrank_cnn.models.rebuild import name_of
from lowrank_cnn.models.twins import dense_twin
from lowrank_cnn.system.clock import Sample, measure, torch_threads
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import as_path
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.system.statistics import pearson


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

    `twin` is the dense network that it is compared with, timed in the same turns, where there is one. `input` is
    the shape of the input, and of a network with several that of the first; `more_inputs` are the others.
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
    more_inputs: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@unchanged()  # a dense twin draws weights when it is built, and forwards may draw
def time_model(
    model: nn.Module,
    input_size: InputSize | None = None,
    *,
    batch: int = 1,
    device: str = "cpu",
    threads: int | None = None,
    runtime: str = "torch",
    repeats: int = 15,
    twin: nn.Module | None = None,
) -> Timing:
    """Time a network in evaluation (in torch: eager, channels_last), whole and by layer, beside its MACs.

    `input_size` is (channels, height, width), or for other inputs than images an example with a batch of its own:
    a tensor, a tuple of all inputs, or a dictionary by keyword.
    Our own networks are compared with their family's dense baseline (see `dense_twin`) unless `twin` is given.
    `runtime` is "torch", or "onnx" for ONNX Runtime on the CPU; the time is the median of `repeats` runs.

    >>> lr.time_model(net, (3, 224, 224)).total.ms  # doctest: +SKIP
    2.31
    """
    from lowrank_cnn.train.fabric import resolve_device

    inputs = _checked(model, input_size, batch, device, runtime)
    device = "cpu" if runtime == "onnx" else resolve_device(device)
    twin = dense_twin(model) if twin is None else twin
    networks = {"network": model} | ({} if twin is None else {"twin": twin})
    prepare = FileRunner.of if runtime == "onnx" else TorchRunner
    with torch_threads(threads), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        runners = {key: prepare(net, inputs, batch, device, Path(folder) / key) for key, net in networks.items()}
        runs = {key: runner.run for key, runner in runners.items()}
        totals = measure(runs, repeats=repeats, cuda=device.startswith("cuda"))
        timed = {key: _timing(networks[key], runners[key], totals[key], runtime, device) for key in networks}
    return replace(timed["network"], twin=timed.get("twin"))


def time_file(
    path: str | Path,
    input_size: Sequence[int] | None = None,
    *,
    batch: int = 1,
    threads: int | None = None,
    repeats: int = 15,
    trusted: bool = False,
) -> Timing:
    """Time an exported file in its engine on the CPU, and the nodes of an .onnx file beside their MACs.

    `input_size` is for files that take images of any size; `trusted` for .pt2 and .ts.
    """
    path = as_path(path)
    if batch < 1:
        raise LowRankError(f"the batch must be positive, not {batch}.")
    with torch_threads(threads):
        runner = FileRunner(path, tuple(input_size) if input_size else None, batch, trusted=trusted)
        total = measure({"file": runner.run}, repeats=repeats)["file"]
        macs = runner.macs()
        layers = _layers(runner.layers(), macs, {})
        used = torch.get_num_threads()
    engine, (shape, *more) = runner.runner.engine, runner.shapes
    r = layer_correlation(layers)
    return Timing(
        path.name, shape, engine, "cpu", used, sum(macs.values()), total, layers, r, more_inputs=tuple(more)
    )


def layer_correlation(layers: Sequence[LayerTime]) -> float | None:
    """Pearson's r between the MACs and the times of the layers that multiply; None for fewer than three."""
    rows = [row for row in layers if row.macs > 0]
    return pearson([row.macs for row in rows], [row.ms for row in rows]) if len(rows) > 2 else None


def _checked(
    model: nn.Module, inputs: InputSize | None, batch: int, device: str, runtime: str
) -> tuple[int, ...] | InputSize:
    check_module(model)
    inputs = notes(model).input_size if inputs is None else inputs
    if inputs is None:
        raise LowRankError("say the size of the images (channels, height, width) that the network takes.")
    if runtime not in ("torch", "onnx"):
        raise LowRankError(f"the runtime is torch or onnx, not {runtime!r}.")
    if runtime == "onnx" and device not in ("cpu", "auto"):
        raise LowRankError(f"onnxruntime is timed on the CPU, not on {device}.")
    if batch < 1:
        raise LowRankError(f"the batch must be positive, not {batch}.")
    size = checked_size(inputs)
    if not is_example(inputs):
        return size
    if batch != 1:
        raise LowRankError("an example has a batch of its own: leave the batch out.")
    return inputs


def _timing(
    model: nn.Module, runner: TorchRunner | FileRunner, total: Sample, runtime: str, device: str
) -> Timing:
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = _layers(runner.layers(), runner.macs(), types)
    whole = runner.times * count(model, runner.counted).macs
    shape, *more = runner.shapes
    return Timing(
        name_of(model),
        shape,
        runtime,
        device,
        torch.get_num_threads(),
        whole,
        total,
        layers,
        layer_correlation(layers),
        more_inputs=tuple(more),
    )


def _layers(times: dict[str, float], macs: dict[str, int], types: dict[str, str]) -> tuple[LayerTime, ...]:
    return tuple(LayerTime(name, types.get(name, ""), macs.get(name, 0), ms) for name, ms in times.items())
