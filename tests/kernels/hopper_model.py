"""A small model of a Hopper GPU, over which the source of the Gluon kernels is run where there is none.

The model is stricter than the device: a fetch poisons its destination until its barrier is waited on, and a
product or a copy to device memory reads shared memory as late as it may, so a buffer that is refilled too early
shows. What threads write may not be read by products and copies before a fence, and a wait that nothing will
satisfy is an error instead of a hang. Barriers between threads are not modelled: there is one.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels import problem
from lowrank_cnn.kernels.problem import describe


class Values(np.ndarray):
    """A register tensor."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def permute(self, *order):
        return self.transpose(order)

    def split(self):
        return self[..., 0], self[..., 1]

    def to(self, dtype, bitcast=False):
        kind = {"int32": np.int32, "int64": np.int64, "uint8": np.uint8}.get(dtype, np.float32)
        return super().view(kind).view(Values) if bitcast else self.astype(kind)


class Shared:
    """A view of shared memory: flat storage, a beginning and a shape."""

    unfenced: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, flat, start, shape, layout=None):
        self.flat, self.start, self.shape, self.layout = flat, start, list(shape), layout

    def index(self, i):
        assert 0 <= i < self.shape[0]
        return Shared(self.flat, self.start + i * int(np.prod(self.shape[1:])), self.shape[1:], self.layout)

    def _reinterpret(self, dtype, shape, layout):
        wide = 1 if isinstance(dtype, str) else dtype.primitive_bitwidth // 32
        shape = [*shape[:-1], shape[-1] * wide]
        assert self.start + np.prod(shape) <= len(self.flat), "a view beyond its allocation"
        return Shared(self.flat, self.start, shape, layout)

    def permute(self, order):
        assert order == [1, 0]
        return Turned(self.flat, self.start, self.shape)

    @property
    def dtype(self):
        return Float32()

    def view(self):
        values = self.flat[self.start : self.start + int(np.prod(self.shape))]
        return (
            values[self.layout.places(self.shape)]
            if isinstance(self.layout, Linear)
            else values.reshape(self.shape)
        )

    def store(self, values):
        self.view()[...] = values
        self.unfenced.append(self.span())

    def load(self, layout):
        values = self.view().copy()
        assert not np.isnan(values).any(), "read before it was fetched"
        return _register(values)

    def span(self):
        start = self.flat.__array_interface__["data"][0] + self.start * self.flat.itemsize
        return start, start + int(np.prod(self.shape)) * self.flat.itemsize

    def seen(self):
        """As products and copies see it: not what threads have written since the last fence."""
        begin, end = self.span()
        assert not any(a < end and begin < b for a, b in self.unfenced), "read before a fence"
        return self.view()


class Linear:
    """A layout by bases: what each bit of a place in memory adds to row and column."""

    def __init__(self, *, offset_bases, alignment):
        self.bases = offset_bases

    def places(self, shape):
        return _places(tuple(map(tuple, self.bases)), tuple(shape))


@lru_cache
def _places(bases, shape):
    """Where in memory each element lies."""
    found = np.zeros(shape, int)
    for place in range(int(np.prod(shape))):
        bits = [basis for i, basis in enumerate(bases) if place >> i & 1]
        found[sum(row for row, _ in bits), sum(column for _, column in bits)] = place
    return found


class Turned(Shared):
    def view(self):
        return super().view().T


class Barrier:
    def __init__(self):
        self.phase, self.expected, self.copies = 0, None, []


class Machine:
    """One program at a time; fetches land when waited for, products run when they must be done."""

    def __init__(self):
        self.program, self.programs, self.products, self.fetched, self.copies = 0, 1, [], 0, []

    def allocate(self, dtype, shape, layout):
        if dtype == "int64":
            return Barriers([Barrier() for _ in range(shape[0])])
        if dtype == "uint8":
            return Shared(np.full(int(np.prod(shape)), 99, np.uint8), 0, shape)
        return Shared(np.full(int(np.prod(shape)), np.nan, np.float32), 0, shape, layout)

    def fetch(self, source, coordinates, barrier, target, pred=True):
        if pred:
            assert list(target.shape) == list(source.box)
            target.view()[...] = np.nan
            barrier.copies.append((source, list(coordinates), target))

    def expect(self, barrier, size, pred=True):
        if pred:
            assert barrier.expected is None, "a second fetch was announced before the first was waited for"
            barrier.expected = size

    def wait(self, barrier, parity):
        if barrier.phase & 1 != parity:
            return
        assert barrier.expected is not None, "a wait that nothing will end"
        size = sum(4 * int(np.prod(target.shape)) for _, _, target in barrier.copies)
        assert size == barrier.expected, "announced and fetched bytes differ"
        for source, coordinates, target in barrier.copies:
            target.view()[...] = source.read(coordinates)
            self.fetched += 1
        barrier.phase, barrier.expected, barrier.copies = barrier.phase + 1, None, []

    def copy(self, target, place, staged):
        self.copies.append((target, list(place), staged))

    def wait_copies(self, left):
        assert left == 0
        for target, place, staged in self.copies:
            target.write(place, staged.seen())
        self.copies = []

    def multiply(self, a, b, acc, *, use_acc=True, is_async):
        self.products.append((a, b, acc, use_acc))
        return acc

    def wait_products(self, left, deps):
        while len(self.products) > left:
            a, b, acc, added = self.products.pop(0)
            acc[...] = (acc if added else 0) + a.seen() @ b.seen()
        return deps[0] if len(deps) == 1 else deps


class Barriers:
    def __init__(self, barriers):
        self.barriers, self.shape = barriers, [len(barriers), 1]

    def index(self, i):
        return self.barriers[i]


class Float32:
    primitive_bitwidth = 32


class Float64:
    primitive_bitwidth = 64


class Descriptor:
    """A tensor map: boxes of a strided tensor; zeros are read and nothing is written outside."""

    def __init__(self, base, shape, strides, block_shape, layout, padding="zero"):
        self.wide = 2 if base.dtype == torch.int64 else 1  # words of two values
        if self.wide > 1:
            base, shape = base.view(torch.float32), [*shape[:-1], 2 * shape[-1]]
            strides = [*(2 * stride for stride in strides[:-1]), 1]
        self.array = torch.as_strided(base, shape, strides).numpy()
        self.value_bytes = 1 if base.dtype == torch.uint8 else 2  # as on the device, where floats have 16 bits
        self.block_shape, self.layout = block_shape, layout
        self.dtype = Float64() if self.wide > 1 else Float32()
        self.box = [*block_shape[:-1], block_shape[-1] * self.wide]

    def _overlap(self, coordinates):
        coordinates = [*coordinates[:-1], coordinates[-1] * self.wide]
        assert coordinates[-1] * self.value_bytes % 16 == 0, "a box begins at a multiple of 16 bytes"
        spans = list(zip(coordinates, self.box, self.array.shape, strict=True))
        inside = tuple(slice(max(c, 0), max(min(c + b, s), 0)) for c, b, s in spans)
        block = tuple(
            slice(i.start - c, max(i.stop - c, i.start - c)) for i, (c, _, _) in zip(inside, spans, strict=True)
        )
        return inside, block

    def read(self, coordinates):
        values = np.zeros(self.box, np.float32)
        inside, block = self._overlap(coordinates)
        if all(i.start < i.stop for i in inside):
            values[block] = self.array[inside]
        return values

    def write(self, coordinates, values):
        inside, block = self._overlap(coordinates)
        if all(i.start < i.stop for i in inside):
            self.array[inside] = values[block]


class Kernel:
    def __init__(self, function, machine):
        self.function, self.machine = function, machine

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **options):
            self.machine.programs = grid[0]
            arguments = [Pointer(a.numpy().reshape(-1)) if isinstance(a, torch.Tensor) else a for a in arguments]
            for program in range(grid[0]):
                self.machine.program, self.machine.products = program, []
                self.function(*arguments, **options)
                assert not self.machine.copies, "a program ended before its copies"

        return launch


def _register(value):
    return np.asarray(value, np.float32).view(Values)


def _where(condition, a, b):
    chosen = np.where(condition, a, b)
    return chosen.view(Values) if chosen.ndim else int(chosen)


def _minimum(a, b, propagate_nan=None):  # as numpy does
    least = np.minimum(a, b)
    return least.view(Values) if least.ndim else int(least)


def _maximum(a, b, propagate_nan=None):
    most = np.maximum(a, b)
    return most.view(Values) if most.ndim else most.item()


def _language(machine):
    return types.SimpleNamespace(
        constexpr=int, int64="int64", int32="int32", uint8="uint8", float32="float32",
        bfloat16="bfloat16", float16="float16", static_range=range, where=_where, minimum=_minimum,
        exp=np.exp, exp2=np.exp2, rsqrt=lambda x: 1 / np.sqrt(x), abs=np.abs,
        PropagateNan=types.SimpleNamespace(ALL=None),
        maximum=_maximum, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.max(axis),
        thread_barrier=lambda: None,
        program_id=lambda _: machine.program, num_programs=lambda _: machine.programs,
        allocate_shared_memory=machine.allocate, load=_load, BlockedLayout=lambda *_: None,
        gather=lambda x, index, axis: np.take_along_axis(x, index, axis), convert_layout=lambda x, layout: x,
        zeros_like=lambda x: _register(np.zeros(x.shape)), store=_store,
        atomic_add=_add, zeros=lambda shape, dtype, layout: _register(np.zeros(shape)),
        arange=lambda a, b, layout: np.arange(a, b, dtype=np.int32).view(Values),
        SliceLayout=lambda axis, parent: None, NVMMADistributedLayout=lambda **_: None,
        NVMMASharedLayout=_shared_layout, SwizzledSharedLayout=lambda *_: None, SharedLinearLayout=Linear,
    )  # fmt: skip


def _shared_layout(**_):
    return "layout"


_shared_layout.get_default_for = lambda block, kind: "layout"


class Pointer:
    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset

    def __add__(self, offset):
        return Pointer(self.array, self.offset + offset)


def _load(pointer, mask=True, other=0.0):
    places = np.where(mask, pointer.offset, 0)
    values = np.where(mask, pointer.array[places], other)
    return values.astype(pointer.array.dtype).view(Values)


def _store(pointer, values, mask=True):
    places = np.broadcast_to(pointer.offset, values.shape)
    mask = np.broadcast_to(mask, values.shape)
    pointer.array[places[mask]] = values[mask]


def _add(pointer, values, mask, sem):
    places = np.broadcast_to(pointer.offset, values.shape)[mask]
    np.add.at(pointer.array, places, values[mask])


def emulate(monkeypatch):
    """The modules of the Gluon kernels with the model in place of Gluon, and the model as `machine`.

    Memory for results comes full of NaN, so that what is never written shows.
    """
    from lowrank_cnn.kernels.conv import tiled  # which needs Triton

    machine = Machine()
    language = _language(machine)
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.jit = lambda function: Kernel(function, machine)
    gluon.language = language
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = Shared.unfenced.clear
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: None, expect=machine.expect, wait=machine.wait
    )
    hopper.tma = types.SimpleNamespace(
        async_copy_global_to_shared=machine.fetch, store_wait=machine.wait_copies,
        async_copy_shared_to_global=machine.copy,
    )  # fmt: skip
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = machine.multiply, machine.wait_products
    host = types.ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.TensorDescriptor = Descriptor
    experimental = types.ModuleType("triton.experimental")
    experimental.gluon = gluon
    for module in (experimental, gluon, hopper, host):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 3)
    modules = {name: _executed(monkeypatch, name) for name in ("hopper", "hopper_weights", "window", "overlap")}
    for module in modules.values():
        module.empty_result, module.launch_pad_channels = _poisoned, _pad_channels
    monkeypatch.setattr(problem, "empty_result", _poisoned)
    known = {**vars(tiled), "tl": language}  # what the kernels share with Triton's
    for name in ("gelu", "activated", "without_codes"):
        known[name] = types.FunctionType(getattr(tiled, name).fn.__code__, known)
    modules["hopper"].activated, modules["hopper"].without_codes = known["activated"], known["without_codes"]
    return types.SimpleNamespace(machine=machine, **modules)


def _executed(monkeypatch, name):
    path = Path(describe.__code__.co_filename).parent / "conv" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"lowrank_cnn.kernels.conv.{name}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _poisoned(problem, x):
    return torch.full((problem.batch, *problem.result_size, problem.filters), torch.nan).permute(0, 3, 1, 2)


def _pad_channels(pixels, size, beyond, border=1):
    """As `copies.launch_pad_channels`, which the model cannot run."""
    _, height, width, channels = pixels.shape
    after = size[0] - height - border, size[1] - width - border
    padded = F.pad(pixels, (0, 4 - channels, border, after[1], border, after[0]))
    padded = F.pad(padded.flatten(0, 1), (0, 0, 0, 0, 0, beyond))
    padded[..., channels : channels + 1] = 1
    return padded
