"""torch.export: write and run .pt2 programs."""

from __future__ import annotations

import io
import json
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import tree_unflatten

from lowrank_cnn.core.errors import LowRankError, first_line
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.deploy.engines.request import ExportRequest, named_tensors
from lowrank_cnn.deploy.engines.runner import EXTRA, Port, Runner, as_array, as_tensor, parse_metadata, ports_from

if TYPE_CHECKING:
    from numpy import ndarray


class ProgramRunner(Runner):
    """A .pt2 program in torch, with the threads that torch has."""

    engine = "torch"
    module: nn.Module

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        program, self.metadata = _read(path)
        self.module = _in_evaluation(program)
        specs = [spec.arg for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
        self._leaves, self._structure = specs, program.call_spec.in_spec
        self.keywords = tuple(tree_unflatten(range(len(specs)), self._structure)[1])  # type: ignore[arg-type]
        known = [spec.name for spec in specs if not isinstance(spec, ConstantArgument)]
        self.inputs = ports_from(self.metadata.get("inputs")) or tuple(Port(name, ()) for name in known)
        self.outputs = ports_from(self.metadata.get("outputs"))

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        rest = iter([as_tensor(port, inputs) for port in self.inputs])
        leaves = [leaf.value if isinstance(leaf, ConstantArgument) else next(rest) for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)  # type: ignore[arg-type]
        try:
            with torch.no_grad():
                found = named_tensors(self.module(*args, **kwargs))
        except (AssertionError, RuntimeError) as error:  # a size that the program was not captured for
            sizes = ", ".join("x".join(map(str, array.shape)) for array in inputs.values())
            raise LowRankError(f"this program does not take an input of {sizes}: {first_line(error)}.") from error
        names = [port.name for port in self.outputs] or list(found)
        return {name: as_array(tensor) for name, tensor in zip(names, found.values(), strict=True)}


def write_program(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Write a .pt2 program that is called as the network is."""
    path, content = folder / f"{stem}.pt2", io.BytesIO()
    program = request.program
    program.example_inputs = None  # a file for others does not hold the user's images
    with warnings.catch_warnings():
        # torch warns of channels-last weights, which it writes correctly: the file is compared with the network.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, content, extra_files={EXTRA: json.dumps(request.metadata)})
    path.write_bytes(content.getvalue())  # by itself torch ends the process where a disk is full
    return path


def _read(path: Path) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    extra = {EXTRA: ""}
    try:
        with open_regular(path) as file:
            program = torch.export.load(file, extra_files=extra)
    except Exception as error:  # torch has no error of its own for a file that it did not write
        raise LowRankError(f"{path} is not a torch.export program: {first_line(error)}.") from error
    return program, parse_metadata(extra[EXTRA])


def _in_evaluation(program: torch.export.ExportedProgram) -> nn.Module:
    module: Any = program.module()
    for part in module.modules():
        part.training = False
    module.eval, module.train = lambda: module, partial(_stay, module)  # torch's own of a program raise
    return module


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        raise LowRankError("a .pt2 program was exported from evaluation and cannot be trained: train the network.")
    return module
