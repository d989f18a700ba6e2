"""Times of networks and their layers, with their multiply-accumulates and their dense twins, and of files.

A network and its twin run in turns, so a short disturbance of the machine affects both alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.modules import InputSize, arguments, checked_size, is_example, known_inputs
from lowrank_cnn.core.notes import AsDict
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.engines.targets import Port, open_engine
from lowrank_cnn.deploy.optimize import LAST, laid_out
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.method.select import check_module
from lowrank_cnn.models.build import dense_twin, name_of, run_entry


@dataclass(frozen=True)
class LayerTime:
    """One layer: its kind, its multiply-accumulates for the batch, and its time inside a run of the network."""

    name: str
    type: str
    macs: int
    ms: float


OUR_KERNELS, TORCHS_CONVS = "our kernels", "torch's convs"


@dataclass(frozen=True)
class Timing(AsDict):
    """A network's time for one batch, and those of its layers; a file is timed as a whole.

    `twin` is the dense network that it is compared with, if any, timed in the same turns. `input` is the shape of
    the first input; `more_inputs` are the shapes of the others. `model` describes the network as the record of a
    run does; None for a file. `convs` says whether its filter groups ran by our kernels or by torch's convs.
    """

    name: str
    input: tuple[int, ...]
    runtime: str
    device: str
    threads: int
    macs: int
    total: Sample
    layers: tuple[LayerTime, ...]
    twin: Timing | None = None
    more_inputs: tuple[tuple[int, ...], ...] = ()
    model: Mapping[str, Any] | None = None
    convs: str = ""

    def __repr__(self) -> str:
        """One line; `layers` has the times of layers."""
        twin = f", {self.twin.name} {self.twin.total.ms:.3f} ms" if self.twin else ""
        where = f"{self.runtime} on {self.device}, {counted(self.threads, 'thread')}"
        return f"{self.name} {self.total.ms:.3f} ms{twin}; {'x'.join(map(str, self.input))}, {where}"


class TorchRunner:
    """A network for inference, its branches folded, with its inputs; both in channels_last where possible."""

    def __init__(self, model: nn.Module, inputs: InputSize, batch: int, device: str) -> None:
        self.model, self.device = model, device
        self.network = in_channels_last(copy_with(fold_branches(model)).eval().to(device))
        self.counted, self.times = inputs, 1 if is_example(inputs) else batch  # an example counts with its batch
        if not is_example(inputs):
            dtype = next((p.dtype for p in model.parameters()), torch.float32)
            draw = torch.Generator(device).manual_seed(0)
            inputs = torch.randn((batch, *checked_size(inputs)), generator=draw, device=device, dtype=dtype)
        self.shapes = [tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        args, kwargs = arguments(inputs, device=device, dtype=None)
        self.args = laid_out(LAST, *args)
        self.kwargs = dict(zip(kwargs, laid_out(LAST, *kwargs.values()), strict=True))
        self.clock = Marks(cuda=device.startswith("cuda"))
        told = " and ".join("x".join(map(str, shape)) for shape in self.shapes)
        with explained(f"the network does not run on an input of {told}"):
            self.run()

    def run(self) -> object:
        return self.network(*self.args, **self.kwargs)

    def convs(self) -> str:
        """Whether any layer of filter groups runs by our kernels, or all convs by torch."""
        told: list[str] = []

        def ask(layer: CompositeConv2d, args: tuple[Tensor, ...]) -> None:
            told.append(layer.explain(args[0]))

        found = [one for one in self.network.modules() if isinstance(one, CompositeConv2d)]
        hooks = [one.register_forward_pre_hook(ask) for one in found]
        self.run()
        for hook in hooks:
            hook.remove()
        return TORCHS_CONVS if all(text.startswith("torch") for text in told) else OUR_KERNELS

    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of each layer, of the whole batch."""
        return {row.name: self.times * row.macs for row in count(self.network, self.counted).layers}

    def layers(self, repeats: int = 7) -> dict[str, float]:
        """Milliseconds of each layer inside whole runs, by hooks: the median of several."""
        hooks, times = [], defaultdict[str, list[float]](list)
        for name, module in self.network.named_modules():
            composite = isinstance(module, CompositeConv2d)  # counts as one layer
            parent = self.network.get_submodule(name.rpartition(".")[0])
            if composite or not (module._modules or isinstance(parent, CompositeConv2d)):
                hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.clock.mark(name)))
                hooks.append(module.register_forward_hook(lambda *_, name=name: self.clock.mark(name)))
        for _ in range(repeats):
            self.run()
            for name, ms in self.clock.collect().items():
                times[name].append(ms)
        for hook in hooks:
            hook.remove()
        return {name: median(taken) for name, taken in times.items()}

    def timing(self, total: Sample) -> Timing:
        types = {key: type(module).__name__ for key, module in self.model.named_modules()}
        macs, whole = self.macs(), self.times * count(self.model, self.counted).macs
        rows = self.layers().items()
        layers = tuple(LayerTime(key, types.get(key, ""), macs.get(key, 0), ms) for key, ms in rows)
        (shape, *more), threads, about = self.shapes, torch.get_num_threads(), run_entry(self.model)
        where, more_about = ("torch", self.device, threads, whole), {"model": about, "convs": self.convs()}
        return Timing(name_of(self.model), shape, *where, total, layers, more_inputs=tuple(more), **more_about)


def _random_array(port: Port, size: Sequence[int] | None, batch: int) -> Any:
    """Random values for an input, its free axes as long as the batch and the image size say."""
    known = dict(enumerate(size or (), start=1)) | {0: batch}
    shape = [side if isinstance(side, int) else known.get(axis) for axis, side in enumerate(port.shape)]
    if None in shape:
        raise LowRankError(f"give the size of the images: {port.name} of this file is {port}.")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    dtype = getattr(torch, port.array_dtype)
    return (drawn if dtype.is_floating_point else 255 * drawn.abs().clamp(max=1)).to(dtype).numpy()


@unchanged()  # a dense twin draws weights when it is built, and forwards may draw
def time_model(
    model: nn.Module,
    input_size: InputSize | None = None,
    *,
    batch: int = 1,
    device: str = "cpu",
    threads: int | None = None,
    repeats: int = 15,
    twin: nn.Module | None = None,
) -> Timing:
    """Time a network in evaluation (in torch: eager, channels_last), whole and by layer, with its MACs.

    `input_size` is (channels, height, width), or for other inputs than images an example with a batch of its own:
    a tensor, a tuple of all inputs, or a dictionary by keyword.
    Our own networks are compared with their family's dense baseline (see `dense_twin`) unless `twin` is given. The
    time is the median of `repeats` runs. `lowrank time` also takes exported files, which run in their engines.

    >>> lr.time_model(net, (3, 224, 224)).total.ms  # doctest: +SKIP
    2.31
    """
    from lowrank_cnn.train.distributed import resolve_device

    check_module(model)
    inputs = known_inputs(model, input_size, "timing")
    check_number("batch", batch, least=1)
    if is_example(inputs) and batch != 1:
        raise LowRankError("an example has a batch of its own: leave the batch out.")
    device = resolve_device(device)
    twin = dense_twin(model) if twin is None else twin
    networks = {"network": model} | ({} if twin is None else {"twin": twin})
    with torch_threads(threads), torch.no_grad():
        runners = {key: TorchRunner(network, inputs, batch, device) for key, network in networks.items()}
        runs = {key: runner.run for key, runner in runners.items()}
        totals = measure(runs, repeats=repeats, cuda=device.startswith("cuda"))
        timed = {key: runner.timing(totals[key]) for key, runner in runners.items()}
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
    """Time an exported file in its engine on the CPU, as a whole.

    `input_size` is for files that take images of any size; `trusted` for .pt2 and .ts.
    """
    path = as_path(path)
    check_number("batch", batch, least=1)
    with torch_threads(threads):
        used = torch.get_num_threads()
        runner = open_engine(path, threads=used, trusted=trusted)
        arrays = {port.name: _random_array(port, input_size, batch) for port in runner.inputs}
        total = measure({"file": lambda: runner(arrays)}, repeats=repeats)["file"]
    shape, *more = (tuple(array.shape) for array in arrays.values())
    return Timing(path.name, shape, runner.engine, "cpu", used, 0, total, (), more_inputs=tuple(more))
