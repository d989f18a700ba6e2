"""torch.export: write and run .pt2 programs."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import tree_unflatten

from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.deploy.engines.request import ExportRequest, named_tensors
from lowrank_cnn.deploy.engines.runner import EXTRA, Engine, Port, Runner, as_array, as_tensor, parse_metadata

if TYPE_CHECKING:
    from numpy import ndarray


class ProgramRunner(Runner):
    """A .pt2 program in torch, with the threads that torch has."""

    engine = "torch"
    module: nn.Module

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        extra = {EXTRA: ""}
        with explained(f"{path} is not a torch.export program"), open_regular(path) as file:
            program = torch.export.load(file, extra_files=extra)
        self.module = _in_evaluation(program)
        signature, self._structure = program.graph_signature, program.call_spec.in_spec
        self._leaves = [spec.arg for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
        self.keywords = tuple(tree_unflatten(range(len(self._leaves)), self._structure)[1])  # type: ignore[arg-type]
        self._take(parse_metadata(extra[EXTRA]))
        # A file of others has no metadata.
        known = [leaf.name for leaf in self._leaves if not isinstance(leaf, ConstantArgument)]
        self.inputs = self.inputs or tuple(Port(name, ()) for name in known)
        self.outputs = self.outputs or tuple(Port(str(name), ()) for name in signature.user_outputs)

    def _run(self, arrays: list[ndarray]) -> list[ndarray]:
        rest = map(as_tensor, self.inputs, arrays)
        leaves = [leaf.value if isinstance(leaf, ConstantArgument) else next(rest) for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)  # type: ignore[arg-type]
        sizes = ", ".join("x".join(map(str, array.shape)) for array in arrays)
        with torch.no_grad(), explained(f"this program does not take an input of {sizes}"):
            found = named_tensors(self.module(*args, **kwargs))
        return [as_array(tensor) for tensor in found.values()]


def write_program(path: Path, request: ExportRequest) -> None:
    """Write a .pt2 program that is called as the network is."""
    content, program = io.BytesIO(), request.program
    program.example_inputs = None  # the file must not contain the user's images
    with warnings.catch_warnings():
        # torch warns of channels-last weights, which it writes correctly: the file is compared with the network.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, content, extra_files={EXTRA: json.dumps(request.metadata)})
    path.write_bytes(content.getvalue())  # torch itself ends the process if the disk is full


def _in_evaluation(program: torch.export.ExportedProgram) -> nn.Module:
    module: Any = program.module()
    for part in module.modules():
        part.training = False

    def stay(mode: bool = True) -> nn.Module:
        if mode:
            raise LowRankError("a .pt2 program is of evaluation mode and cannot be trained: train the network.")
        return module

    module.eval, module.train = lambda: module, stay  # torch's own of a program raise
    return module


_USAGE = """import torch; {made}
network = torch.export.load({file}).module()
with torch.no_grad(): logits = network({called})"""
PROGRAM = Engine(".pt2", ProgramRunner, write_program, _USAGE, "torch", trusted=True)
