"""TorchScript traces: a network recorded on one call, and refused where one call does not show what it computes.

A trace holds the path that the example took. Where Python reads values that come from the inputs, as in
`if x.mean() > 0`, another image takes another path, and random images need not show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.results import tensors_of

_READS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "equal")
"""Calls that give Python the values of a tensor."""


@torch.no_grad()
def trace(network: nn.Module, example: Sequence[Tensor], name: str) -> Any:
    """The network, of this name, as TorchScript."""
    try:
        with unchanged(network):
            with _Following(example) as followed:
                network(*(tensor.clone() for tensor in example))
            if not followed.reads:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch deprecates TorchScript, and warns of Python numbers
                    return torch.jit.trace(network, copied(*example), check_trace=False)
    except Exception as error:  # whatever a forward does that cannot be traced
        raise LowRankError(f"torch cannot trace {name}: {first_line(error)}.") from error
    raise LowRankError(
        f"torch cannot trace {name}: its forward reads values that depend on the input "
        f"({', '.join(dict.fromkeys(followed.reads))}), and a trace would hold those of the example."
    )


class _Following(TorchFunctionMode):
    """Follows what is computed from some tensors, and notes where Python reads the values of it."""

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
