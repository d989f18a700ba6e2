"""Networks ready to be timed: a copy in torch, or a file in its engine, each with the inputs that it is run on."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowrank_cnn.deploy.engines import Port, open_engine
from lowrank_cnn.deploy.engines.onnx import OnnxRunner, node_macs
from lowrank_cnn.deploy.engines.request import Call
from lowrank_cnn.deploy.engines.runner import as_array
from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.deploy.optimized import Form
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.inputs import InputSize, arguments, checked_size, is_example
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewriting import copy_with, in_channels_last
from lowrank_cnn.system.clock import CudaMarks, Marks
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.files import read_json


class TorchRunner:
    """A copy of a network in evaluation and what it is run on, both in channels_last where they have it.

    Branches of training are folded: nobody runs them afterwards.
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
        form = Form("channels_last")
        self.args = form.laid_out(*args)
        self.kwargs = dict(zip(kwargs, form.laid_out(*kwargs.values()), strict=True))
        self._check()
        self.clock = CudaMarks() if device.startswith("cuda") else Marks()

    def _check(self) -> None:
        try:
            self.run()
        except LowRankError:
            raise
        except Exception as error:  # whatever the forward makes of other inputs
            told = " and ".join("x".join(map(str, shape)) for shape in self.shapes)
            raise LowRankError(f"the network does not run on an input of {told}: {first_line(error)}.") from error

    def run(self) -> object:
        return self.network(*self.args, **self.kwargs)

    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of each layer, of the whole batch."""
        return {row.name: self.times * row.macs for row in count(self.network, self.counted).layers}

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


class FileRunner:
    """A network's file in its engine; of an .onnx file, layers are the nodes of the graph."""

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
        """Multiply-accumulates of each node, of the whole batch; of files other than .onnx none are known."""
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
        return {name: median(taken[1:]) for name, taken in times.items() if taken[1:]}


def _random_array(port: Port, size: Sequence[int] | None, batch: int) -> Any:
    """Random values for an input, its free axes as long as the batch and the image size say."""
    known = dict(enumerate(size or (), start=1)) | {0: batch}
    shape = [side if isinstance(side, int) else known.get(axis) for axis, side in enumerate(port.shape)]
    if None in shape:
        raise LowRankError(f"say the size of the images: {port.name} of this file is {port}.")
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
