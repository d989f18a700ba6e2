"""TorchScript: write and run .ts files, for programs that embed torch in C++."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.deploy.engines.outputs import named_tensors
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import EXTRA, Runner, as_array, as_tensor, parse_metadata, ports_from
from lowrank_cnn.deploy.engines.tracing import trace
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.files import open_regular

if TYPE_CHECKING:
    from numpy import ndarray


class ScriptRunner(Runner):
    """A .ts file in torch, with the threads that torch has; its inputs go in by position."""

    engine = "torch"
    module: nn.Module

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.module, self.metadata = read_script(path)
        self.inputs = ports_from(self.metadata.get("inputs"))
        self.outputs = ports_from(self.metadata.get("outputs"))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path} does not name its inputs: it was not exported by this library.")

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        with torch.no_grad():
            found = named_tensors(self.module(*(as_tensor(port, inputs) for port in self.inputs)))
        return {port.name: as_array(tensor) for port, tensor in zip(self.outputs, found.values(), strict=True)}


def write_script(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Trace the network; the file takes tensors by position, and gives a tensor, or a tuple of several."""
    path = folder / f"{stem}.ts"
    example = tuple(request.traced_call.tensors.values())
    script = trace(request.positional(), example, request.name)
    path.write_bytes(script_bytes(script, {EXTRA: json.dumps(request.metadata)}))
    return path


def script_bytes(script: Any, extra: dict[str, str] | None = None) -> bytes:
    """The content of a file. By itself torch ends the process where a disk is full."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        try:
            torch.jit.save(script, content, _extra_files=extra or {})
        except RuntimeError as error:  # a torch.autograd.Function of the user's own, say
            raise LowRankError(f"TorchScript cannot hold the network: {first_line(error)}.") from error
    return content.getvalue()


def read_script(path: Path) -> tuple[nn.Module, dict[str, str]]:
    """The module of a trusted file in evaluation, and what the file says of it."""
    extra = {EXTRA: ""}
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            module: Any = torch.jit.load(file, map_location="cpu", _extra_files=extra)
    except Exception as error:  # torch has no error of its own for a file that it did not write
        raise LowRankError(f"{path} is not a TorchScript file: {first_line(error)}.") from error
    return module.eval(), parse_metadata(extra[EXTRA])
