"""Compare a written file with the network that it holds: every output, at every size that the file promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.engines import Runner, open_engine
from lowrank_cnn.deploy.engines.outputs import named_tensors
from lowrank_cnn.deploy.engines.request import Call, ExportRequest
from lowrank_cnn.deploy.engines.runner import as_array
from lowrank_cnn.models.files import dtype_of
from lowrank_cnn.system.compare import ROUNDED, difference, is_finite, unchanged
from lowrank_cnn.system.errors import LowRankError, first_line

TOLERANCES = {"fp32": 1e-3, "fp16": ROUNDED, "int8": 0.3}
"""How far an output may be off, relative to its largest value. Of int8, accuracy on real images says more."""

_MOST_VALUES = 2**24
"""Values of the largest inputs on which another path of a forward is compared."""


class DifferentOutputError(LowRankError):
    """A file that does not compute what its network does."""


@torch.no_grad()
def parity(path: Path, request: ExportRequest, network: nn.Module) -> float:
    """The largest difference between file and network; too large is an error."""
    if path.suffix == ".onnx" and dtype_of(network) == torch.bfloat16:
        from lowrank_cnn.deploy.engines.onnx import in_float32

        twin = in_float32(path)  # onnxruntime does not compute in bfloat16: both are compared in float32
        try:
            return parity(twin, in_full(request), network.float())
        finally:
            twin.unlink()
    runner = open_engine(path, trusted=True)  # which was written just now
    worst = 0.0
    for call, expected in _calls(request, network):
        worst = max(worst, _call_error(runner, call, expected, request, network))
    for sizes in request.other_paths:
        call = request.call.sized(request.axes, sizes)
        try:
            too_large = sum(tensor.numel() for tensor in call.tensors.values()) > _MOST_VALUES
            expected = {} if too_large else checked_outputs(network, call)
        except LowRankError:  # the network does not take this size either
            continue
        try:
            if too_large:
                raise LowRankError("it is too large to be compared")
            worst = max(worst, _call_error(runner, call, expected, request, network))
        except Exception as error:  # engines have errors of their own
            words = " and ".join(sizes)
            raise LowRankError(
                f"the network has no free {words} (choose with dynamic=): for an input of {_shapes(call)} its "
                "forward takes another path than for the example, and a file holds one path."
            ) from error
    return worst


def _call_error(
    runner: Runner, call: Call, expected: dict[str, Tensor], request: ExportRequest, network: nn.Module
) -> float:
    """The largest difference between file and network for one call; too large is an error."""
    limit = ROUNDED if dtype_of(network).itemsize == 2 else TOLERANCES[request.precision]
    given, worst = runner({name: as_array(tensor) for name, tensor in call.tensors.items()}), 0.0
    for name, right in zip(request.outputs, expected.values(), strict=True):
        error = _output_error(given, name, right)
        if not error <= limit:
            raise DifferentOutputError(
                f"for an input of {_shapes(call)}, {name} of the exported network differs from the original by "
                f"{error:.1e}{_overflow(request.precision, given.get(name))}: nothing was written."
            )
        worst = max(worst, error)
    return worst


def _shapes(call: Call) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in call.tensors.values())


def checked_outputs(network: nn.Module, call: Call) -> dict[str, Tensor]:
    """What a network gives for the example, by name; a network that fails, or gives NaN, is refused."""
    try:
        with torch.no_grad(), unchanged(network):
            found = named_tensors(call.copied().run(network))
    except LowRankError:
        raise
    except Exception as error:  # whatever a forward makes of another size, dtype or device
        raise LowRankError(
            f"the network does not run on an input of {_shapes(call)}: {first_line(error)}."
        ) from error
    if not is_finite(list(found.values())):
        raise LowRankError("the network gives NaN or infinite values on random images: nothing was written.")
    return found


def in_full(request: ExportRequest) -> Any:
    """The same request with every tensor of its example in float32."""
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in request.call.tensors.items()}
    return replace(request, call=request.call.replaced(tensors))


def _calls(request: ExportRequest, network: nn.Module) -> Iterator[tuple[Call, dict[str, Tensor]]]:
    """Calls of every kind that the file promises to take, each with what the network gives for it."""
    yield request.call, checked_outputs(network, request.call)
    # int8 holds for values in the range of its calibration images, and noise is far from that.
    noise = request.precision != "int8"
    for seed, sizes in enumerate(request.tried_sizes, start=1):
        tried = request.call.sized(request.axes, sizes, seed=seed if noise else None)
        try:  # a forward may refuse random numbers in any way of its own
            yield tried, checked_outputs(network, tried)
            continue
        except LowRankError:
            if not sizes:
                continue
        tried = request.call.sized(request.axes, sizes)
        try:
            yield tried, checked_outputs(network, tried)
        except LowRankError as why:
            words = " and ".join(sizes)
            raise LowRankError(f"the network has no free {words} (choose with dynamic=): {why}") from why


def _overflow(precision: str, given: Any) -> str:
    """Why a file in half precision gives infinite values or NaN."""
    overflows = precision == "fp16" and given is not None and not is_finite(torch.from_numpy(given))
    return ", since its values overflow in half precision" if overflows else ""


def _output_error(given: dict[str, Any], name: str, right: Tensor) -> float:
    """How far an output is off: relative to its largest value, or for whole numbers the share that differ."""
    if name not in given:
        return float("inf")
    ours = torch.from_numpy(given[name])
    if ours.shape != right.shape:
        return float("inf")
    if right.is_floating_point() and ours.is_floating_point():
        return difference(ours.to(right.dtype), right)
    if right.is_floating_point() or ours.is_floating_point():
        return float("inf")
    return float((ours != right).double().mean()) if right.numel() else 0.0
