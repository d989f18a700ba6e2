"""Write a network to a file that others can run, and read it back without running anything stored in it.

| suffix       | holds                                                    | read back by `load` as           |
|--------------|----------------------------------------------------------|----------------------------------|
| .onnx        | the graph and the weights, for any batch size            | a module that runs onnxruntime   |
| .pt2         | a `torch.export` program, for any batch size             | a module, if the file is trusted |
| .safetensors | the weights, how to build the network around them, and   | the network itself, to train on  |
|              | its images' size, classes and preparation, where known   |                                  |

`load` also reads the directory of a training run, or one of its checkpoints. The first two formats are compared
with the network on random inputs before the file appears. Composites stay 2-D convs side by side, so the saving in
multiply-accumulates is kept; in .onnx each group is rectified and pooled before all are concatenated, which lets a
runtime fuse those steps. A file is written whole or not at all.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lowrank_cnn.deploy.candidates import groups_apart, in_layers
from lowrank_cnn.deploy.names import name_nodes, without_traces
from lowrank_cnn.deploy.runtime import OnnxModel
from lowrank_cnn.method.selection import check_module
from lowrank_cnn.models.files import Stored, dtype_of, read_weights, write_weights
from lowrank_cnn.system.compare import ROUNDED, difference, is_finite
from lowrank_cnn.system.errors import LowRankError, first_line, require
from lowrank_cnn.system.files import as_path, replacing
from lowrank_cnn.system.provenance import note, notes
from lowrank_cnn.train.trained import Trained, load_checkpoint

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Exported:
    """The file, its size, and its largest difference from the network on random inputs, relative to the output."""

    path: str
    bytes: int
    error: float | None

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


def export(
    model: nn.Module | Trained,
    path: str | Path,
    *,
    input_size: Sequence[int] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write `model`, as it is in evaluation, in the format that the suffix of `path` names.

    `input_size` is (channels, height, width) of an image; our own networks know theirs, and so does what
    `load_checkpoint` gives, of which a .safetensors keeps the classes too, and how its images are prepared: such a
    file can be evaluated as its run can. Image sizes other than this one are for .safetensors alone: a graph is
    traced for one size and any batch.
    """
    path = as_path(path)
    write = _writer(path)
    stored = model.stored(input_size) if isinstance(model, Trained) else _stored(model, input_size)
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; overwrite=True (--overwrite) replaces it.")
    if not path.parent.is_dir():
        raise LowRankError(f"there is no directory {path.parent} to write {path.name} into.")
    try:
        with replacing(path) as temporary:
            error = write(temporary, stored)
            temporary.chmod(0o644)  # safetensors writes for its owner alone
    except SafetensorError as failure:
        raise LowRankError(f"{path} could not be written ({failure}).") from failure
    return Exported(str(path), path.stat().st_size, error)


def load(path: str | Path, *, into: nn.Module | None = None, trusted: bool = False) -> nn.Module:
    """The network in a file that `export` wrote, or of a training run, in evaluation mode. Stored code is not run.

    `notes(network).input_size` is that of the images it was exported for or trained on, where the file says so.

    - `into`: for the weights of a network that is not one of ours, that network, as it was before any conversion;
      it is left as it is.
    - `trusted`: needed for .pt2, which torch reads by evaluating expressions and, in places, by unpickling.
    """
    path = as_path(path)
    if path.is_dir() or (path.suffix in ("", ".json", ".safetensors") and path.with_suffix(".json").is_file()):
        trained = load_checkpoint(path, network=copy.deepcopy(into))
        note(trained.network, input_size=trained.input_size)
        return trained.network.eval()
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    if path.suffix == ".onnx":
        return OnnxModel(path)
    if path.suffix == ".safetensors":
        return read_weights(path, into=into).network.eval()
    if path.suffix != ".pt2":
        raise LowRankError(_formats(path))
    if not trusted:
        raise LowRankError(
            f"reading {path.name} can run code stored in it: say trusted=True for a file of your own."
        )
    return _load_program(path)


def _load_program(path: Path) -> nn.Module:
    try:
        module = torch.export.load(path).module()
    except Exception as error:  # torch has no error of its own for a file that it did not write
        raise LowRankError(f"{path} is not a torch.export program: {first_line(error)}") from error
    for part in module.modules():  # it has no eval() of its own, and was exported from evaluation
        part.training = False
    return module


def _stored(model: nn.Module, input_size: Sequence[int] | None) -> Stored:
    check_module(model)
    size = input_size or notes(model).input_size
    stored = Stored(model, tuple(size) if size else None)
    carried = notes(model).training_card
    return replace(stored, card=carried.card, preprocess=dict(carried.preprocess)) if carried else stored


def _writer(path: Path) -> Callable[[Path, Stored], float | None]:
    writers = {".onnx": _write_onnx, ".pt2": _write_program, ".safetensors": write_weights}
    if path.suffix not in writers:
        raise LowRankError(_formats(path))
    return writers[path.suffix]


def _formats(path: Path) -> str:
    return f"a network's file ends in .onnx, .pt2 or .safetensors, not in {path.suffix!r}."


def _write_onnx(path: Path, stored: Stored) -> float:
    require("onnxscript", extra="onnx", purpose="writing ONNX")
    require("onnxruntime", extra="onnx", purpose="checking the written ONNX")
    dtype = dtype_of(stored.network)
    if dtype not in (torch.float32, torch.float16):
        raise LowRankError(f"onnxruntime has no convolutions in {dtype}: export model.float().")
    program = _program(replace(stored, network=groups_apart(in_layers(stored.network).eval())))
    with _quiet():
        onnx = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["image"], output_names=["output"]
        )
    assert onnx is not None
    name_nodes(onnx.model.graph)
    onnx.save(str(path), external_data=False)
    return _checked(OnnxModel(path), stored)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself and packages that it looks for."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write_program(path: Path, stored: Stored) -> float:
    torch.export.save(_program(stored), path)
    return _checked(torch.export.load(path).module(), stored)


def _program(stored: Stored) -> torch.export.ExportedProgram:
    x = _images(stored, batch=2)
    network = in_layers(stored.network).eval()
    batch = {0: torch.export.Dim("batch", min=1)}
    try:
        return without_traces(torch.export.export(network, (x,), dynamic_shapes=(batch,)))
    except LowRankError:
        raise
    except Exception as error:  # whatever a forward does that cannot be traced
        name = type(network).__name__
        raise LowRankError(f"torch.export cannot trace {name}: {first_line(error)}") from error


@torch.no_grad()
def _checked(written: nn.Module, stored: Stored) -> float:
    """The largest relative difference between file and network, for several batches; too large is an error."""
    network = copy.deepcopy(stored.network).eval()
    worst = 0.0
    for batch in (1, 3):
        x = _images(stored, batch=batch)
        expected = network(x)
        if not isinstance(expected, Tensor):
            kind = type(expected).__name__
            raise LowRankError(f"the network gives a {kind}, not a tensor: export a module that gives one output.")
        given = written(x).to(expected)
        worst = max(worst, difference(given, expected))
    if not worst <= (_TOLERANCE if dtype_of(stored.network).itemsize > 2 else ROUNDED):
        if not is_finite(expected):
            raise LowRankError("the network gives NaN or infinite values on random images: nothing was written.")
        raise LowRankError(f"the exported network differs from the original by {worst:.1e}: nothing was written.")
    return worst


def _images(stored: Stored, *, batch: int) -> Tensor:
    if stored.input_size is None:
        raise LowRankError("say the size of the images (channels, height, width) that the network takes.")
    network = stored.network
    device = next((tensor.device for tensor in chain(network.parameters(), network.buffers())), None)
    x = torch.randn(batch, *stored.input_size, generator=torch.Generator().manual_seed(batch))
    return x.to(device, dtype_of(network))
