"""Engines whose files hold a network for one image: the runner feeds a batch image by image."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.deploy.engines.request import Call, ExportRequest
from lowrank_cnn.deploy.engines.runner import Runner, ports_from, read_beside
from lowrank_cnn.system.errors import LowRankError

if TYPE_CHECKING:
    from numpy import ndarray


class PerImageRunner(Runner):
    """Runs the images of a batch one after the other; an engine runs one image."""

    @abstractmethod
    def _run_image(self, inputs: list[ndarray]) -> list[ndarray]:
        """The outputs for inputs without an axis for the batch, without that axis as well."""

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        import numpy

        batches = [numpy.ascontiguousarray(inputs[port.name]) for port in self.inputs]
        results = [self._run_image(list(images)) for images in zip(*batches, strict=True)]
        if not results:
            raise LowRankError(f"{self.engine} needs at least one image.")
        return {
            port.name: numpy.stack(each)
            for port, each in zip(self.outputs, zip(*results, strict=True), strict=True)
        }

    def _read_ports(self, path: Path) -> None:
        """Take names, shapes and precision from the file beside."""
        self.metadata = read_beside(path)
        self.inputs, self.outputs = (ports_from(self.metadata.get(key)) for key in ("inputs", "outputs"))
        if not self.inputs or not self.outputs:
            raise LowRankError(f"{path.name}.json, which names the inputs of {path}, is missing or damaged.")


def first_image(request: ExportRequest, engine: str) -> Call:
    """The example as one image; anything that is free besides the batch is refused."""
    axes = [word for free in request.axes.values() for axis, word in free.items() if axis or word != "batch"]
    if axes:
        raise LowRankError(f"a file for {engine} has one size of image: leave {axes[0]} out of dynamic.")
    return request.call.replaced({name: tensor[:1] for name, tensor in request.call.tensors.items()})
