"""TorchScript: write and run .ts files, for programs that embed torch in C++."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lowrank_cnn.core.compare import copied, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.deploy.engines.request import ExportRequest, named_tensors
from lowrank_cnn.deploy.engines.runner import EXTRA, Engine, Runner, as_array, as_tensor, parse_metadata

if TYPE_CHECKING:
    from numpy import ndarray

# TorchScript traces: a network is recorded on one call, and refused if other calls may compute something else.
#
# A trace holds the path of the example. If Python reads values of the inputs, as in
# `if x.mean() > 0`, another image may take another path, and random images need not show that.

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


class ScriptRunner(Runner):
    """A .ts file in torch, on torch's threads; its inputs are positional."""

    engine = "torch"
    module: nn.Module

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        extra = {EXTRA: ""}
        with explained(f"{path} is not a TorchScript file"), warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            module: Any = torch.jit.load(file, map_location="cpu", _extra_files=extra)
        self.module = module.eval()
        self._take(parse_metadata(extra[EXTRA]))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path} does not name its inputs: it was not exported by this library.")

    def _run(self, arrays: list[ndarray]) -> list[ndarray]:
        with torch.no_grad():
            found = self.module(*map(as_tensor, self.inputs, arrays))
        return [as_array(tensor) for tensor in named_tensors(found).values()]


def write_script(path: Path, request: ExportRequest) -> None:
    """Trace the network; the file takes tensors by position, and gives a tensor, or a tuple of several."""
    script = trace(request.positional(), tuple(request.traced_call.tensors.values()), request.name)
    path.write_bytes(script_bytes(script, {EXTRA: json.dumps(request.metadata)}))


def script_bytes(script: Any, extra: dict[str, str] | None = None) -> bytes:
    """The content of a file. Torch itself would end the process if the disk is full."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        with explained("TorchScript cannot hold the network"):  # for example the user's own autograd function
            torch.jit.save(script, content, _extra_files=extra or {})
    return content.getvalue()


_USAGE = """import torch; {made}
network = torch.jit.load({file})
with torch.no_grad(): logits = network({given})"""
TORCHSCRIPT = Engine(".ts", ScriptRunner, write_script, _USAGE, "torch", trusted=True)
