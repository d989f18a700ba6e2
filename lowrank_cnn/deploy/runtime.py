"""A network's file as a module: called with tensors, run by the engine of the file on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.engines.onnx import OnnxRunner
from lowrank_cnn.deploy.engines.runner import Runner, as_array
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted

_MOST_IMAGES = 1024
"""The largest fixed batch that a smaller one is filled up to: a file may ask for any."""


class EngineModel(nn.Module):
    """Runs a file in its engine. Several outputs are given as a dictionary by name.

    - A file with a fixed batch (of one, say) runs several times for a larger batch.
    - A file that prepares images itself takes uint8, or the same values as floating-point numbers; these may be
      [N, C, H, W] where the file takes [N, H, W, C].
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner
        for port in runner.inputs:
            if not isinstance(getattr(torch, port.dtype, None), torch.dtype):
                raise LowRankError(
                    f"this file takes {port.name} in {port.dtype}, which is no type of tensors here."
                )
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
        """Run batches of the file's own size; the last one is filled up, and its surplus left out."""
        self.runner.check_image(given[0])
        padded = torch.cat([given, given[-1:].expand(-len(given) % batch, *given.shape[1:])])
        parts = [self._run({name: part}) for part in padded.split(batch)]
        if any(tensor.shape[:1] != (batch,) for tensor in parts[0].values()):
            raise LowRankError(f"this file takes {counted(batch, 'image')} at a time, not {len(given)}.")
        return {key: torch.cat([part[key] for part in parts])[: len(given)] for key in parts[0]}


class OnnxModel(EngineModel):
    """An .onnx file that runs on the CPU; `threads` limits what it uses, 0 leaves that to ONNX Runtime."""

    runner: OnnxRunner

    def __init__(self, path: str | Path, *, threads: int = 0, profile: str | Path | None = None) -> None:
        super().__init__(OnnxRunner(Path(path), threads=threads, profile=profile))


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
