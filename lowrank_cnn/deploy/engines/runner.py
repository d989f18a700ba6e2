"""What every engine gives: a file's inputs and outputs by name, its metadata, and a call with arrays."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, first_line
from lowrank_cnn.core.files import LARGEST_JSON, read_regular, write_json
from lowrank_cnn.deploy.engines.request import Call, ExportRequest

if TYPE_CHECKING:
    from numpy import ndarray

EXTRA = "lowrank_cnn.json"
"""The part of a file of torch's that holds its metadata."""


@dataclass(frozen=True)
class Port:
    """An input or output: its name, its shape with names ("batch") or None for axes of any length, its dtype."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str = "float32"

    @property
    def array_dtype(self) -> str:
        """The dtype of its arrays: numpy has no bfloat16, so that goes in and out as float32."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def takes(self, array: ndarray) -> bool:
        """Whether an array has the dimensions that are fixed here."""
        pairs = zip(array.shape, self.shape, strict=False)
        fits = all(not isinstance(wanted, int) or size == wanted for size, wanted in pairs)
        return array.ndim == len(self.shape) and fits

    def __str__(self) -> str:
        return "x".join(str(size or "any") for size in self.shape) or "a number"


class Runner(ABC):
    """A network's file in an engine, on the CPU. An engine fills the attributes, and runs checked arrays."""

    engine: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: dict[str, str]
    module: nn.Module | None = None
    """The file as a module, of the formats that torch reads itself."""

    @abstractmethod
    def __init__(self, path: Path, *, threads: int = 0) -> None: ...

    @abstractmethod
    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]: ...

    def __call__(self, inputs: ndarray | Mapping[str, ndarray]) -> dict[str, ndarray]:
        """The outputs by name. A network of one input takes an array alone."""
        named = dict(inputs) if isinstance(inputs, Mapping) else {self.inputs[0].name: inputs}
        self._check(named)
        try:
            return self._run(named)
        except LowRankError:
            raise
        except Exception as error:  # each engine has its own family of errors
            raise LowRankError(f"{self.engine} cannot run this file: {first_line(error)}.") from error

    def check_image(self, image: Any) -> None:
        """Refuse one image (or its array) that does not fit the first input behind the batch."""
        port = self.inputs[0]
        if not Port(port.name, port.shape[1:]).takes(image):
            given = "x".join(map(str, image.shape))
            raise LowRankError(f"this file takes {port.name} of {port}, not images of {given}.")

    def _check(self, inputs: Mapping[str, ndarray]) -> None:
        """Refuse in a sentence what the engine would refuse in its own words."""
        names = [port.name for port in self.inputs]
        if set(names) != set(inputs):
            raise LowRankError(f"this file takes {', '.join(names)}, not {', '.join(inputs)}.")
        for port in self.inputs:
            array = inputs[port.name]
            if not port.takes(array):
                given = "x".join(map(str, array.shape)) or "a number"
                raise LowRankError(f"this file takes {port.name} of {port}, not of {given}.")
            if str(array.dtype) != port.array_dtype:
                raise LowRankError(f"this file takes {port.name} in {port.array_dtype}, not in {array.dtype}.")


@contextmanager
def silent_process() -> Iterator[None]:
    """Send what compiled code prints to nowhere: some engines print about themselves."""
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


def write_beside(path: Path, metadata: Mapping[str, str]) -> None:
    """Keep metadata in a JSON file beside a file that has no place for it."""
    write_json(_beside(path), dict(metadata))


def read_beside(path: Path) -> dict[str, str]:
    """What `write_beside` kept; empty where there is no such file or it is damaged."""
    try:
        return parse_metadata(read_regular(_beside(path), most=LARGEST_JSON))
    except OSError:
        return {}


def parse_metadata(text: str | bytes) -> dict[str, str]:
    """Metadata that a file keeps as one piece of JSON; empty where it is absent or damaged."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def as_tensor(port: Port, inputs: Mapping[str, ndarray]) -> Tensor:
    """An input as torch takes it, copied: a program may change what it is given."""
    return torch.from_numpy(inputs[port.name]).to(getattr(torch, port.dtype), copy=True)


def as_array(tensor: Tensor) -> ndarray:
    """An output as numpy holds it."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def ports_from(text: str | None) -> tuple[Port, ...]:
    """Inputs or outputs that a file keeps as JSON, where its format does not name them."""
    try:
        return tuple(Port(row["name"], tuple(row["shape"]), row["dtype"]) for row in json.loads(text or ""))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


# Engines whose files hold a network for one image: the runner feeds a batch image by image.


class PerImageRunner(Runner):
    """Runs the images of a batch one after the other; an engine runs one image."""

    @abstractmethod
    def _run_image(self, inputs: list[ndarray]) -> list[ndarray]:
        """The outputs for inputs without an axis for the batch, without that axis as well."""

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        import numpy

        batches = [numpy.ascontiguousarray(inputs[port.name]) for port in self.inputs]
        results = [self._run_image(list(images)) for images in zip(*batches, strict=True)]
        if not results:
            raise LowRankError(f"{self.engine} needs at least one image.")
        return {
            port.name: numpy.stack(each)
            for port, each in zip(self.outputs, zip(*results, strict=True), strict=True)
        }

    def _read_ports(self, path: Path) -> None:
        """Take names, shapes and precision from the file beside."""
        self.metadata = read_beside(path)
        self.inputs, self.outputs = (ports_from(self.metadata.get(key)) for key in ("inputs", "outputs"))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path.name}.json, which names the inputs of {path}, is missing or damaged.")


def first_image(request: ExportRequest, engine: str) -> Call:
    """The example as one image; anything that is free besides the batch is refused."""
    axes = [word for free in request.axes.values() for axis, word in free.items() if axis or word != "batch"]
    if axes:
        raise LowRankError(f"a file for {engine} has one size of image: leave {axes[0]} out of dynamic.")
    return request.call.replaced({name: tensor[:1] for name, tensor in request.call.tensors.items()})
