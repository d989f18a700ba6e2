"""Times of networks and their layers, with their multiply-accumulates and their dense twins.

A network and its twin run in turns, so a short disturbance of the machine affects both alike.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowrank_cnn.core.clock import Marks, Sample, measure, torch_threads
from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, check_number, explained
from lowrank_cnn.core.files import as_path, read_json
from lowrank_cnn.core.modules import InputSize, arguments, checked_size, is_example, known_inputs
from lowrank_cnn.core.notes import AsDict
from lowrank_cnn.core.numbers import pearson
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.engines.onnx import OnnxRunner, node_macs, timed_nodes
from lowrank_cnn.deploy.engines.request import Call
from lowrank_cnn.deploy.engines.runner import as_array
from lowrank_cnn.deploy.engines.targets import Port, open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.optimize import LAST, laid_out
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.method.select import check_module
from lowrank_cnn.models.build import dense_twin, name_of, run_entry

# Networks ready to be timed: a copy in torch, or a file in its engine, each with its inputs.


class TorchRunner:
    """A copy of a network in evaluation and its inputs, both in channels_last if they have that format.

    Training-only branches are folded.
    """

    def __init__(self, model: nn.Module, inputs: InputSize, batch: int, device: str, scratch: Path) -> None:
        self.network = in_channels_last(copy_with(fold_branches(model)).eval().to(device))
        self.counted, self.times = inputs, 1 if is_example(inputs) else batch  # an example counts with its batch
        if not is_example(inputs):
            dtype = next((p.dtype for p in model.parameters()), torch.float32)
            draw = torch.Generator(device).manual_seed(0)
            inputs = torch.randn((batch, *checked_size(inputs)), generator=draw, device=device, dtype=dtype)
        self.shapes = _shapes(inputs)
        args, kwargs = arguments(inputs, device=device, dtype=None)
        self.args = laid_out(LAST, *args)
        self.kwargs = dict(zip(kwargs, laid_out(LAST, *kwargs.values()), strict=True))
        told = " and ".join("x".join(map(str, shape)) for shape in self.shapes)
        with explained(f"the network does not run on an input of {told}"):
            self.run()
        self.clock = Marks(cuda=device.startswith("cuda"))

    def run(self) -> object:
        return self.network(*self.args, **self.kwargs)

    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of each layer, of the whole batch."""
        return {row.name: self.times * row.macs for row in count(self.network, self.counted).layers}

    def layers(self, repeats: int = 7) -> dict[str, float]:
        """Milliseconds of each layer inside whole runs, by hooks: the median of several."""
        hooks = []
        for name, module in _timed(self.network):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.clock.mark(name)))
            hooks.append(module.register_forward_hook(lambda *_, name=name: self.clock.mark(name)))
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            self.run()
            for name, ms in self.clock.collect().items():
                times[name].append(ms)
        for hook in hooks:
            hook.remove()
        return {name: median(taken) for name, taken in times.items()}


class FileRunner:
    """A network's file in its engine; for an .onnx file, layers are the nodes of the graph."""

    def __init__(self, path: Path, shape: tuple[int, ...] | None, batch: int, *, trusted: bool = False) -> None:
        self.path, self.threads = path, torch.get_num_threads()
        self.runner = open_engine(path, threads=self.threads, trusted=trusted)
        self.arrays = {port.name: _random_array(port, shape, batch) for port in self.runner.inputs}
        self.shapes = [tuple(array.shape) for array in self.arrays.values()]
        self.counted: InputSize = self.shapes[0][1:]
        self.times = self.shapes[0][0]

    @classmethod
    def of(cls, model: nn.Module, inputs: InputSize, batch: int, device: str, scratch: Path) -> FileRunner:
        path = scratch.with_suffix(".onnx")
        if not is_example(inputs):
            export(model, path, input_size=checked_size(inputs))
            return cls(path, checked_size(inputs), batch)
        export(model, path, example_input=inputs, dynamic=())
        made = cls(path, None, 1)
        made.arrays = {name: as_array(tensor) for name, tensor in Call.of(model, inputs).tensors.items()}
        made.counted, made.times = inputs, 1
        return made

    def run(self) -> object:
        return self.runner(self.arrays)

    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of each node, for the whole batch; empty for files other than .onnx."""
        found = node_macs(self.path) if self.path.suffix == ".onnx" else {}
        return {name: self.shapes[0][0] * macs for name, macs in found.items()}

    def layers(self, repeats: int = 7) -> dict[str, float]:
        """Milliseconds of each node, from the runtime's own profile: the median of several runs."""
        if self.path.suffix != ".onnx":
            return {}
        times: dict[str, list[float]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            profiled = OnnxRunner(self.path, threads=self.threads, profile=Path(folder) / "profile")
            for _ in range(repeats + 1):
                profiled(self.arrays)
            events = read_json(Path(profiled.session.end_profiling()), most=2**30)
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                name = event["name"].removesuffix("_kernel_time").removeprefix("fused ")
                times[name].append(event["dur"] / 1000)
        nodes = timed_nodes(self.path, times)
        return {nodes[name]: median(taken[1:]) for name, taken in times.items() if taken[1:]}


def _random_array(port: Port, size: Sequence[int] | None, batch: int) -> Any:
    """Random values for an input, its free axes as long as the batch and the image size say."""
    known = dict(enumerate(size or (), start=1)) | {0: batch}
    shape = [side if isinstance(side, int) else known.get(axis) for axis, side in enumerate(port.shape)]
    if None in shape:
        raise LowRankError(f"give the size of the images: {port.name} of this file is {port}.")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    dtype = getattr(torch, port.array_dtype)
    return (drawn if dtype.is_floating_point else 255 * drawn.abs().clamp(max=1)).to(dtype).numpy()


def _timed(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules that compute; a composite counts as one."""
    for name, module in network.named_modules():
        whole = isinstance(module, CompositeConv2d)
        inside = name.rpartition(".")[0]
        parent = network.get_submodule(inside) if inside else None
        if (whole or not module._modules) and not isinstance(parent, CompositeConv2d):
            yield name, module


def _shapes(inputs: InputSize) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class LayerTime:
    """One layer: its kind, its multiply-accumulates for the batch, and its time inside a run of the network."""

    name: str
    type: str
    macs: int
    ms: float


@dataclass(frozen=True)
class Timing(AsDict):
    """A network's time for one batch. `correlation` is Pearson's r of MACs and time over its layers.

    `twin` is the dense network that it is compared with, if any, timed in the same turns. `input` is the shape of
    the first input; `more_inputs` are the shapes of the others. `model` describes the network as the record of a
    run does; None for a file.
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
    model: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        """One line; `layers` has the times of layers."""
        twin = f", {self.twin.name} {self.twin.total.ms:.3f} ms" if self.twin else ""
        where = f"{self.runtime} on {self.device}, {counted(self.threads, 'thread')}"
        return f"{self.name} {self.total.ms:.3f} ms{twin}; {'x'.join(map(str, self.input))}, {where}"


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
    """Time a network in evaluation (in torch: eager, channels_last), whole and by layer, with its MACs.

    `input_size` is (channels, height, width), or for other inputs than images an example with a batch of its own:
    a tensor, a tuple of all inputs, or a dictionary by keyword.
    Our own networks are compared with their family's dense baseline (see `dense_twin`) unless `twin` is given.
    `runtime` is "torch", or "onnx" for ONNX Runtime on the CPU; the time is the median of `repeats` runs.

    >>> lr.time_model(net, (3, 224, 224)).total.ms  # doctest: +SKIP
    2.31
    """
    from lowrank_cnn.train.distributed import resolve_device

    inputs = _checked(model, input_size, batch, device, runtime)
    device = "cpu" if runtime == "onnx" else resolve_device(device)
    twin = dense_twin(model) if twin is None else twin
    networks = {"network": model} | ({} if twin is None else {"twin": twin})
    prepare = FileRunner.of if runtime == "onnx" else TorchRunner
    with torch_threads(threads), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        runners = {key: prepare(net, inputs, batch, device, Path(folder) / key) for key, net in networks.items()}
        runs = {key: runner.run for key, runner in runners.items()}
        totals = measure(runs, repeats=repeats, cuda=device.startswith("cuda"))
        timed = {
            key: _timing(name_of(net), runners[key], totals[key], (runtime, device), net)
            for key, net in networks.items()
        }
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
    """Time an exported file in its engine on the CPU, and the nodes of an .onnx file with their MACs.

    `input_size` is for files that take images of any size; `trusted` for .pt2 and .ts.
    """
    path = as_path(path)
    check_number("batch", batch, least=1)
    with torch_threads(threads):
        runner = FileRunner(path, tuple(input_size) if input_size else None, batch, trusted=trusted)
        total = measure({"file": runner.run}, repeats=repeats)["file"]
        return _timing(path.name, runner, total, (runner.runner.engine, "cpu"))


def layer_correlation(layers: Sequence[LayerTime]) -> float | None:
    """Pearson's r between the MACs and the times of the layers that multiply; None for fewer than three."""
    rows = [row for row in layers if row.macs > 0]
    return pearson([row.macs for row in rows], [row.ms for row in rows]) if len(rows) > 2 else None


def _checked(model: nn.Module, inputs: InputSize | None, batch: int, device: str, runtime: str) -> InputSize:
    check_module(model)
    inputs = known_inputs(model, inputs, "timing")
    if runtime not in ("torch", "onnx"):
        raise LowRankError(f"the runtime is torch or onnx, not {runtime!r}.")
    if runtime == "onnx" and device not in ("cpu", "auto"):
        raise LowRankError(f"onnxruntime is timed on the CPU, not on {device}.")
    check_number("batch", batch, least=1)
    if is_example(inputs) and batch != 1:
        raise LowRankError("an example has a batch of its own: leave the batch out.")
    return inputs


def _timing(
    name: str,
    runner: TorchRunner | FileRunner,
    total: Sample,
    where: tuple[str, str],
    model: nn.Module | None = None,
) -> Timing:
    """A network's time with its layers; for a file, the MACs are those of its nodes."""
    types = {} if model is None else {key: type(module).__name__ for key, module in model.named_modules()}
    times, macs = runner.layers(), runner.macs()
    layers = tuple(LayerTime(key, types.get(key, ""), macs.get(key, 0), ms) for key, ms in times.items())
    whole = sum(macs.values()) if model is None else runner.times * count(model, runner.counted).macs
    (shape, *more), used, r = runner.shapes, torch.get_num_threads(), layer_correlation(layers)
    about = None if model is None else run_entry(model)
    return Timing(name, shape, *where, used, whole, total, layers, r, more_inputs=tuple(more), model=about)
