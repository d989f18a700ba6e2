"""Compare a written file with its network: every output, at every size that the file supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import ROUNDED, difference, is_finite
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.engines.request import Call, ExportRequest, checked_outputs, shapes_of
from lowrank_cnn.deploy.engines.runner import Runner, as_array
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.models.network_file import dtype_of

TOLERANCES = {"fp32": 1e-3, "fp16": ROUNDED, "int8": 0.3}
"""Largest error of an output, relative to its largest value. For int8, accuracy on real images says more."""

_MOST_VALUES = 2**24
"""Most values of inputs on which another path of a forward is compared."""


class DifferentOutputError(LowRankError):
    """A file that does not compute the same as its network."""


@torch.no_grad()
def parity(path: Path, request: ExportRequest, network: nn.Module) -> float:
    """The largest difference between file and network; too large is an error."""
    runner = open_engine(path, trusted=True)  # which was written just now
    limit = ROUNDED if dtype_of(network).itemsize == 2 else TOLERANCES[request.precision]
    errors = [_call_error(runner, call, right, request, limit) for call, right in _calls(request, network)]
    for sizes in request.other_paths:
        call = request.call.sized(request.axes, sizes)
        too_large = sum(tensor.numel() for tensor in call.tensors.values()) > _MOST_VALUES
        try:
            expected = {} if too_large else checked_outputs(network, call)
        except LowRankError:  # the network does not take this size either
            continue
        try:
            if too_large:
                raise LowRankError("it is too large to be compared")
            errors.append(_call_error(runner, call, expected, request, limit))
        except Exception as error:  # engines have errors of their own
            raise LowRankError(
                f"{' and '.join(sizes)} cannot be dynamic (choose with dynamic=): for an input of "
                f"{shapes_of(call)} the forward takes another path than for the example, and a file has one path."
            ) from error
    return max(errors)


def _calls(request: ExportRequest, network: nn.Module) -> Iterator[tuple[Call, dict[str, Tensor]]]:
    """Calls of every kind that the file supports, each with the network's results."""
    yield request.call, checked_outputs(network, request.call)
    for seed, sizes in enumerate(request.tried_sizes, start=1):
        given = request.call.sized(request.axes, sizes)
        # int8 holds for values in the range of its calibration images, and noise is far from that.
        drawn = given if request.precision == "int8" else request.call.sized(request.axes, sizes, seed=seed)
        for call in [drawn, given] if sizes else [drawn]:
            try:
                yield call, checked_outputs(network, call)
                break
            except LowRankError as why:  # a forward may refuse random numbers in any way of its own
                if sizes and call is given:
                    words = " and ".join(sizes)
                    raise LowRankError(f"{words} cannot be dynamic (choose with dynamic=): {why}") from why


def _call_error(
    runner: Runner, call: Call, expected: dict[str, Tensor], request: ExportRequest, limit: float
) -> float:
    """The largest difference between file and network for one call; above the limit it is an error."""
    given, worst = runner({name: as_array(tensor) for name, tensor in call.tensors.items()}), 0.0
    for name, right in zip(request.outputs, expected.values(), strict=True):
        ours = torch.from_numpy(given[name]) if name in given else None
        if ours is None or ours.shape != right.shape or ours.is_floating_point() or right.is_floating_point():
            error = difference(ours, right)
        else:  # whole numbers, as indices of the largest value: the share that differ
            error = int((ours != right).sum()) / max(1, right.numel())
        if not error <= limit:
            overflows = request.precision == "fp16" and not is_finite(ours)
            why = ", since its values overflow in half precision" if overflows else ""
            raise DifferentOutputError(
                f"for an input of {shapes_of(call)}, {name} of the exported network differs from the original by "
                f"{error:.1e}{why}: nothing was written."
            )
        worst = max(worst, error)
    return worst


_MOST_IMAGES = 1024
"""Largest fixed batch to which a smaller one is padded: a file may declare any."""


class EngineModel(nn.Module):
    """Runs a file in its engine. Several outputs are given as a dictionary by name.

    - A file with a fixed batch runs several times for a larger batch.
    - A file with preprocessing takes uint8, or the same values as floating-point numbers; these may be [N, C, H,
      W] even if the file takes [N, H, W, C].
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner
        for port in runner.inputs:
            if not isinstance(getattr(torch, port.dtype, None), torch.dtype):
                raise LowRankError(f"this file takes {port.name} in {port.dtype}, which torch does not have.")
        if not runner.inputs:
            raise LowRankError("this file takes no input.")
        first = runner.inputs[0]
        self.input_size = tuple(size if isinstance(size, int) else None for size in first.shape[1:])
        self.dtype: torch.dtype = getattr(torch, first.dtype)
        self.pixels: str = runner.metadata.get("pixels", "").strip('"')
        self.eval()

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor | dict[str, Tensor]:
        ports = self.runner.inputs
        if len(tensors) + len(named) != len(ports):
            raise LowRankError(f"this file takes {', '.join(port.name for port in ports)}.")
        inputs = {port.name: tensor for port, tensor in zip(ports, tensors, strict=False)} | named
        name, first = next(iter(inputs.items()))
        if self.pixels and first.is_floating_point():
            first = inputs[name] = as_pixels(first, nhwc=self.pixels == "nhwc")
        batch = ports[0].shape[0] if ports[0].shape else None
        alone = len(ports) == 1 and first.dim() == len(ports[0].shape) and len(first) > 0
        if alone and isinstance(batch, int) and 0 < batch <= _MOST_IMAGES and len(first) != batch:
            found = self._in_turns(name, first, batch)
        else:
            found = self._run(inputs)
        placed = {key: tensor.to(first.device) for key, tensor in found.items()}
        return next(iter(placed.values())) if len(placed) == 1 else placed

    def _run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: as_array(tensor.detach().cpu().contiguous()) for name, tensor in inputs.items()}
        return {name: torch.from_numpy(array) for name, array in self.runner(arrays).items()}

    def _in_turns(self, name: str, given: Tensor, batch: int) -> dict[str, Tensor]:
        """Run batches of the file's own size; the last one is padded, and the surplus results are dropped."""
        self.runner.check_image(given[0])
        padded = torch.cat([given, given[-1:].expand(-len(given) % batch, *given.shape[1:])])
        parts = [self._run({name: part}) for part in padded.split(batch)]
        if any(tensor.shape[:1] != (batch,) for tensor in parts[0].values()):
            raise LowRankError(f"this file takes {counted(batch, 'image')} at a time, not {len(given)}.")
        return {key: torch.cat([part[key] for part in parts])[: len(given)] for key in parts[0]}


def as_pixels(images: Tensor, *, nhwc: bool) -> Tensor:
    """Pixel values of 0 to 255 in floating point as uint8; images that were prepared already are refused."""
    low, high = float(images.min()), float(images.max())
    whole = bool((images == images.round()).all())
    if not (low >= -0.5 and high < 255.5) or (high <= 1 and not whole):
        raise LowRankError(
            f"this file prepares images itself: it takes pixel values of 0 to 255, not {low:.3g} to {high:.3g}."
        )
    pixels = images.round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous() if nhwc else pixels
