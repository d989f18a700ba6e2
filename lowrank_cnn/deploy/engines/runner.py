"""The parts of an engine: a record of its formats and features, and a runner of its files."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.files import LARGEST_JSON, read_regular, write_json

if TYPE_CHECKING:
    from numpy import ndarray

    from lowrank_cnn.deploy.engines.request import ExportRequest

Arrays = list["ndarray"]


@dataclass(frozen=True)
class Port:
    """An input or output: its name, its shape with names ("batch") or None for axes of any length, its dtype."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str = "float32"

    @property
    def array_dtype(self) -> str:
        """The dtype of its arrays: numpy has no bfloat16, so float32 replaces it."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def takes(self, array: ndarray) -> bool:
        """Whether an array has the fixed dimensions."""
        pairs = zip(array.shape, self.shape, strict=False)
        return array.ndim == len(self.shape) and all(a == b for a, b in pairs if isinstance(b, int))

    def __str__(self) -> str:
        return "x".join(str(size or "any") for size in self.shape) or "a number"


class Runner(ABC):
    """A network's file in an engine, on the CPU. A subclass sets the attributes, and runs checked arrays."""

    engine: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: dict[str, str]
    module: nn.Module | None = None
    """The file as a module, for formats that torch reads itself."""
    one_image = False
    """Whether a file holds the network for one image: the images of a batch then run one after the other."""

    @abstractmethod
    def __init__(self, path: Path, *, threads: int = 0) -> None: ...

    @abstractmethod
    def _run(self, arrays: Arrays) -> Arrays:
        """The outputs for arrays, both in the order of the ports."""

    def __call__(self, inputs: ndarray | Mapping[str, ndarray]) -> dict[str, ndarray]:
        """The outputs by name. A network of one input takes an array alone."""
        given = dict(inputs) if isinstance(inputs, Mapping) else {self.inputs[0].name: inputs}
        names = [port.name for port in self.inputs]
        if set(names) != set(given):
            raise LowRankError(f"this file takes {', '.join(names)}, not {', '.join(given)}.")
        arrays = [given[name] for name in names]
        for port, array in zip(self.inputs, arrays, strict=True):  # with clearer messages than the engine's
            if not port.takes(array):
                shape = "x".join(map(str, array.shape)) or "a number"
                raise LowRankError(f"this file takes {port.name} of {port}, not of {shape}.")
            if str(array.dtype) != port.array_dtype:
                raise LowRankError(f"this file takes {port.name} in {port.array_dtype}, not in {array.dtype}.")
        with explained(f"{self.engine} cannot run this file"):
            results = self._one_by_one(arrays) if self.one_image else self._run(arrays)
            return dict(zip((port.name for port in self.outputs), results, strict=True))

    def _one_by_one(self, arrays: Arrays) -> Arrays:
        import numpy

        batches = [numpy.ascontiguousarray(array)[:, None] for array in arrays]
        results = [self._run(list(images)) for images in zip(*batches, strict=True)]
        if not results:
            raise LowRankError(f"{self.engine} needs at least one image.")
        return [numpy.concatenate(each) for each in zip(*results, strict=True)]

    def check_image(self, image: Any) -> None:
        """Refuse one image (or its array) that does not fit the first input without the batch."""
        port = self.inputs[0]
        if not Port(port.name, port.shape[1:]).takes(image):
            given = "x".join(map(str, image.shape))
            raise LowRankError(f"this file takes {port.name} of {port}, not images of {given}.")

    def _take(self, metadata: dict[str, str]) -> None:
        """Store the metadata of a file, with the inputs and outputs that it names."""
        self.metadata = metadata
        self.inputs, self.outputs = (ports_from(metadata.get(key)) for key in ("inputs", "outputs"))

    def _read_beside(self, path: Path) -> None:
        """Take metadata, inputs and outputs from the file that `write_beside` wrote."""
        self._take({})
        with suppress(OSError):
            self._take(parse_metadata(read_regular(path.with_name(f"{path.name}.json"), most=LARGEST_JSON)))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path.name}.json, which names the inputs of {path}, is missing or damaged.")


@dataclass(frozen=True)
class Engine:
    """An engine that runs networks. `ENGINES` in `targets.py` has one for each name of `--to` and `--engine`."""

    suffix: str
    runner: type[Runner]
    write: Callable[[Path, ExportRequest], None]
    """Writes a request to a path; other files that belong to it go into the same folder."""
    usage: str
    """Three lines of Python that run a file by itself: see `usage` in `targets.py` for what they may name."""
    package: str
    """The package that runs its files."""
    writer: str = ""
    """A second package, which writes them."""
    modes: tuple[str, str] = ("", "")
    """The values of {mode} in `usage` for fp32 and for fp16."""
    int8: bool = False
    lowers: bool = False
    """Whether it converts a float32 graph to half precision itself."""
    in_single: Callable[[nn.Module, bool], bool] = lambda part, strips: False
    """Whether a layer stays in float32 in an fp16 file, which may have compiled strips."""
    trusted: bool = False
    """Whether reading a file can run code stored in it."""
    strips: bool = False
    """Whether files have the compiled operator of `lowrank_strips`."""

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(name) for name in (self.package, self.writer) if name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs and warnings of tools; errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def silent_process() -> Iterator[None]:
    """Discard the output of compiled code: some engines print messages."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123, a descriptor is what is needed
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            for descriptor, stream in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)


def write_beside(path: Path, request: ExportRequest) -> None:
    """Write metadata and precision to a JSON file, for formats that have no place for them."""
    write_json(path.with_name(f"{path.name}.json"), {**request.metadata, "precision": request.precision})


def parse_metadata(text: str | bytes) -> dict[str, str]:
    """Metadata that a file stores as JSON; empty if it is missing or damaged."""
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def ports_from(text: str | None) -> tuple[Port, ...]:
    """Inputs or outputs that a file stores as JSON, if its format does not name them."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return tuple(Port(row["name"], tuple(row["shape"]), row["dtype"]) for row in json.loads(text or ""))
    return ()


def as_array(tensor: Tensor) -> ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
