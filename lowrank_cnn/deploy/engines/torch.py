"""torch's own files: .pt2 programs of torch.export, and .ts traces of TorchScript, for programs in C++."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lowrank_cnn.core.compare import copied, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.deploy.engines.request import ExportRequest, named_tensors
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Port, Runner, as_array, parse_metadata

_EXTRA = "lowrank_cnn.json"
"""The part of a file that holds our metadata."""


class TorchRunner(Runner):
    """A file in torch, with the threads that torch has."""

    engine = "torch"
    module: nn.Module

    def _call(self, tensors: list[Tensor]) -> Any:
        return self.module(*tensors)

    def _run(self, arrays: Arrays) -> Arrays:
        pairs = zip(self.inputs, arrays, strict=True)
        # Copies, because a program may change its inputs.
        tensors = [torch.from_numpy(array).to(getattr(torch, port.dtype), copy=True) for port, array in pairs]
        with torch.no_grad():
            return [as_array(tensor) for tensor in named_tensors(self._call(tensors)).values()]


class ProgramRunner(TorchRunner):
    """A .pt2 program, called as the network was."""

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        extra = {_EXTRA: ""}
        with open_regular(path) as file:
            program = torch.export.load(file, extra_files=extra)
        self.module = _in_evaluation(program)
        signature, self._structure = program.graph_signature, program.call_spec.in_spec
        self._leaves = [spec.arg for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
        self.keywords = tuple(tree_unflatten(range(len(self._leaves)), self._structure)[1])  # type: ignore[arg-type]
        self._take(parse_metadata(extra[_EXTRA]))
        # A file of others has no metadata.
        known = [leaf.name for leaf in self._leaves if not isinstance(leaf, ConstantArgument)]
        self.inputs = self.inputs or tuple(Port(name, ()) for name in known)
        self.outputs = self.outputs or tuple(Port(str(name), ()) for name in signature.user_outputs)

    def _call(self, tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [leaf.value if isinstance(leaf, ConstantArgument) else next(rest) for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)  # type: ignore[arg-type]
        return self.module(*args, **kwargs)


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


def write_program(path: Path, request: ExportRequest) -> None:
    """Write a .pt2 program that is called as the network is."""
    content, program = io.BytesIO(), request.program
    program.example_inputs = None  # the file must not contain the user's images
    with warnings.catch_warnings():
        # torch warns of channels-last weights, which it writes correctly: the file is compared with the network.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, content, extra_files={_EXTRA: json.dumps(request.metadata)})
    path.write_bytes(content.getvalue())  # torch itself ends the process if the disk is full


# A trace holds the path of the example. If Python reads values of the inputs, as in `if x.mean() > 0`, another
# image may take another path, and random images need not show that: such a network is refused.

_READS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "equal")
"""Calls that give Python the values of a tensor."""


@torch.no_grad()
def trace(network: nn.Module, example: Sequence[Tensor], name: str) -> Any:
    """The network as TorchScript; `name` is for error messages."""
    with explained(f"torch cannot trace {name}"), unchanged(network):
        with _Following(example) as followed:
            network(*(tensor.clone() for tensor in example))
        if not followed.reads:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch deprecates TorchScript, and warns of Python numbers
                return torch.jit.trace(network, copied(*example), check_trace=False)
    raise LowRankError(
        f"torch cannot trace {name}: its forward reads values that depend on the input "
        f"({', '.join(dict.fromkeys(followed.reads))}), and a trace would hold those of the example."
    )


class _Following(TorchFunctionMode):
    """Follows everything computed from some tensors, and notes where Python reads its values."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary(dict.fromkeys(inputs, True))
        self.reads: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if any(tensor in self.known for tensor in tensors_of((args, kwargs))):
            self.reads += [name] if name in _READS else []
            written = args[:1] if name == "__setitem__" or name.endswith("_") else ()
            for tensor in tensors_of((result, written, (kwargs or {}).get("out"))):
                self.known[tensor] = True
        return result


class ScriptRunner(TorchRunner):
    """A .ts file; its inputs are positional."""

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        extra = {_EXTRA: ""}
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            module: Any = torch.jit.load(file, map_location="cpu", _extra_files=extra)
        self.module = module.eval()
        self._take(parse_metadata(extra[_EXTRA]))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path} does not name its inputs: it was not exported by this library.")


def write_script(path: Path, request: ExportRequest) -> None:
    """Trace the network; the file takes tensors by position, and gives a tensor, or a tuple of several."""
    script = trace(request.positional(), tuple(request.traced_call.tensors.values()), request.name)
    path.write_bytes(script_bytes(script, {_EXTRA: json.dumps(request.metadata)}))


def script_bytes(script: Any, extra: dict[str, str] | None = None) -> bytes:
    """The content of a file. Torch itself would end the process if the disk is full."""
    content = io.BytesIO()
    # It cannot hold the user's own autograd function, for example. Torch deprecates it.
    with explained("TorchScript cannot hold the network"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(script, content, _extra_files=extra or {})
    return content.getvalue()


_PROGRAM_USAGE = """import torch; {made}
network = torch.export.load({file}).module()
with torch.no_grad(): logits = network({called})"""
_SCRIPT_USAGE = """import torch; {made}
network = torch.jit.load({file})
with torch.no_grad(): logits = network({given})"""
PROGRAM = Engine(".pt2", ProgramRunner, write_program, _PROGRAM_USAGE, "torch", trusted=True)
TORCHSCRIPT = Engine(".ts", ScriptRunner, write_script, _SCRIPT_USAGE, "torch", trusted=True)
