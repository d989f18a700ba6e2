"""A network's file as a module: called with tensors, run by the engine of the file on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.engines.onnx import OnnxRunner
from lowrank_cnn.deploy.engines.runner import Runner
from lowrank_cnn.system.errors import LowRankError


class EngineModel(nn.Module):
    """Runs a file in its engine. Several outputs are given as a dictionary by name.

    Where the file has a fixed batch (of one, say) and another is given, it runs as often as that takes.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner
        first = runner.inputs[0]
        self.input_size = tuple(size if isinstance(size, int) else None for size in first.shape[1:])
        self.dtype: torch.dtype = getattr(torch, first.dtype)
        self.eval()

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor | dict[str, Tensor]:
        ports = self.runner.inputs
        if len(tensors) + len(named) != len(ports):
            raise LowRankError(f"this file takes {', '.join(port.name for port in ports)}.")
        inputs = {port.name: tensor for port, tensor in zip(ports, tensors, strict=False)} | named
        batch = ports[0].shape[0] if ports[0].shape else None
        name, given = next(iter(inputs.items()))
        fixed = len(ports) == 1 and isinstance(batch, int) and given.dim() == len(ports[0].shape)
        found = self._in_turns(name, given, batch) if fixed and len(given) != batch else self._run(inputs)
        return next(iter(found.values())) if len(found) == 1 else found

    def _run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {}
        for name, tensor in inputs.items():
            tensor = tensor.detach().cpu().contiguous()
            arrays[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return {name: torch.from_numpy(array) for name, array in self.runner(arrays).items()}

    def _in_turns(self, name: str, given: Tensor, batch: int) -> dict[str, Tensor]:
        """Batches of the file's own size; the last one is filled up, and its surplus left out."""
        padded = torch.cat([given, given[-1:].expand(-len(given) % batch, *given.shape[1:])])
        parts = [self._run({name: part}) for part in padded.split(batch)]
        if any(tensor.shape[:1] != (batch,) for tensor in parts[0].values()):
            raise LowRankError(f"this file takes {batch} images at a time, not {len(given)}.")
        return {key: torch.cat([part[key] for part in parts])[: len(given)] for key in parts[0]}


class OnnxModel(EngineModel):
    """An .onnx file that runs on the CPU; `threads` limits what it uses, 0 leaves that to ONNX Runtime."""

    runner: OnnxRunner

    def __init__(self, path: str | Path, *, threads: int = 0, profile: str | Path | None = None) -> None:
        super().__init__(OnnxRunner(Path(path), threads=threads, profile=profile))
