"""Write a network to a file that others can run, and read it back without running anything stored in it.

| suffix       | holds                                                    | read back by `load` as           |
|--------------|----------------------------------------------------------|----------------------------------|
| .onnx        | the graph and the weights, for any batch size            | a module that runs onnxruntime   |
| .pt2         | a `torch.export` program, for any batch size             | a module, if the file is trusted |
| .safetensors | the weights, and how to build the network around them    | the network itself, to train on  |

`load` also reads the directory of a training run, or one of its checkpoints. The first two formats are compared
with the network on random inputs before the file appears. Composites stay 2-D convs side by side, so the saving in
multiply-accumulates is kept; in .onnx each group is rectified and pooled before all are concatenated, which lets a
runtime fuse those steps. A file is written whole or not at all.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lowrank_cnn.deploy.candidates import groups_apart
from lowrank_cnn.deploy.runtime import OnnxModel
from lowrank_cnn.errors import LowRankError, require
from lowrank_cnn.rebuild import describe, rebuild
from lowrank_cnn.selection import check_module

_KEY = "lowrank_cnn"
_TOLERANCE = 1e-3
CHANGED = (
    "the network no longer is what its configuration builds (merged or changed by hand): "
    "export it before that, or to .onnx or .pt2."
)
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


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
    model: nn.Module, path: str | Path, *, input_size: Sequence[int] | None = None, overwrite: bool = False
) -> Exported:
    """Write `model`, as it is in evaluation, in the format that the suffix of `path` names.

    `input_size` is (channels, height, width) of an image; our own networks know theirs. Image sizes other than
    this one are for .safetensors alone: a graph is traced for one size and any batch.
    """
    path = Path(path)
    write = _writer(path)
    check_module(model)
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; say overwrite to replace it.")
    if not path.parent.is_dir():
        raise LowRankError(f"there is no directory {path.parent} to write {path.name} into.")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        error = write(model, temporary, input_size)
        temporary.replace(path)
    except (OSError, SafetensorError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise LowRankError(f"{path} cannot be written: {reason}.") from failure
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(str(path), path.stat().st_size, error)


def load(path: str | Path, *, into: nn.Module | None = None, trusted: bool = False) -> nn.Module:
    """The network in a file that `export` wrote, or of a training run, in evaluation mode. Stored code is not run.

    - `into`: for the weights of a network that is not one of ours, that network, as it was before any conversion;
      it is left as it is.
    - `trusted`: needed for .pt2, which torch reads by evaluating expressions and, in places, by unpickling.
    """
    path = Path(path)
    if path.is_dir() or (path.suffix in ("", ".json", ".safetensors") and path.with_suffix(".json").is_file()):
        from lowrank_cnn.evaluation import load_checkpoint

        return load_checkpoint(path, network=copy.deepcopy(into)).network.eval()
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    if path.suffix == ".onnx":
        return OnnxModel(path)
    if path.suffix == ".safetensors":
        return _load_weights(path, into).eval()
    if path.suffix != ".pt2":
        raise LowRankError(_formats(path))
    if not trusted:
        raise LowRankError(
            f"reading {path.name} can run code stored in it: say trusted=True for a file of your own."
        )
    return _load_program(path)


def _load_program(path: Path) -> nn.Module:
    try:
        return torch.export.load(path).module()
    except Exception as error:  # torch has no error of its own for a file that it did not write
        raise LowRankError(f"{path} is not a torch.export program: {_first_line(error)}") from error


def _writer(path: Path) -> Callable[[nn.Module, Path, Sequence[int] | None], float | None]:
    writers = {".onnx": _write_onnx, ".pt2": _write_program, ".safetensors": _write_weights}
    if path.suffix not in writers:
        raise LowRankError(_formats(path))
    return writers[path.suffix]


def _formats(path: Path) -> str:
    return f"a network's file ends in .onnx, .pt2 or .safetensors, not in {path.suffix!r}."


def _write_onnx(model: nn.Module, path: Path, input_size: Sequence[int] | None) -> float:
    require("onnxscript", extra="onnx", purpose="writing ONNX")
    require("onnxruntime", extra="onnx", purpose="checking the written ONNX")
    if _dtype(model) not in (torch.float32, torch.float16):
        raise LowRankError(f"onnxruntime has no convolutions in {_dtype(model)}: export model.float().")
    program = _program(groups_apart(copy.deepcopy(model).eval()), input_size)
    with _quiet():
        onnx = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["image"], output_names=["output"]
        )
    assert onnx is not None
    onnx.save(str(path), external_data=False)
    return _checked(OnnxModel(path), model, input_size)


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


def _write_program(model: nn.Module, path: Path, input_size: Sequence[int] | None) -> float:
    torch.export.save(_program(model, input_size), path)
    return _checked(torch.export.load(path).module(), model, input_size)


def _write_weights(model: nn.Module, path: Path, input_size: Sequence[int] | None) -> None:
    description = describe(model)
    if description["model"] is not None:
        _check_description(model, description)
    elif any(row.parts and not row.reason for row in getattr(model, "merging", ())):
        raise LowRankError(CHANGED)
    text = json.dumps({**description, "dtype": str(_dtype(model))})
    safetensors.torch.save_model(model, str(path), metadata={"format": "pt", _KEY: text})


def _check_description(model: nn.Module, description: dict[str, object]) -> None:
    with torch.device("meta"):
        again = rebuild(description).state_dict()
    stored = model.state_dict()
    if {name: t.shape for name, t in stored.items()} != {name: t.shape for name, t in again.items()}:
        raise LowRankError(CHANGED)


def _load_weights(path: Path, into: nn.Module | None) -> nn.Module:
    description = _description(path)
    network = rebuild(description, into=into)
    network = copy.deepcopy(network) if network is into else network
    network.to(_DTYPES.get(str(description.get("dtype")), _dtype(network)))
    try:
        safetensors.torch.load_model(network, str(path))
    except RuntimeError as error:
        raise LowRankError(f"the weights in {path} do not fit the network: {_first_line(error)}") from error
    return network


def _description(path: Path) -> dict[str, object]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
    except (SafetensorError, OSError) as error:
        raise LowRankError(f"{path} is not a safetensors file: {error}.") from error
    if text is None:
        raise LowRankError(f"{path} holds weights but not how to build a network around them.")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise LowRankError(f"{path} does not say how to build a network: its description is damaged.")
    return found


def _program(model: nn.Module, input_size: Sequence[int] | None) -> torch.export.ExportedProgram:
    x = _images(model, input_size, batch=2)
    network = copy.deepcopy(model).eval()
    batch = {0: torch.export.Dim("batch", min=1)}
    try:
        return torch.export.export(network, (x,), dynamic_shapes=(batch,))
    except LowRankError:
        raise
    except Exception as error:  # whatever a forward does that cannot be traced
        name = type(model).__name__
        raise LowRankError(f"torch.export cannot trace {name}: {_first_line(error)}") from error


@torch.no_grad()
def _checked(written: nn.Module, model: nn.Module, input_size: Sequence[int] | None) -> float:
    """The largest relative difference between file and network, for several batches; too large is an error."""
    network = copy.deepcopy(model).eval()
    worst = 0.0
    for batch in (1, 3):
        x = _images(model, input_size, batch=batch)
        expected = network(x)
        if not isinstance(expected, Tensor):
            kind = type(expected).__name__
            raise LowRankError(f"the network gives a {kind}, not a tensor: export a module that gives one output.")
        given = written(x).to(expected)
        worst = max(worst, float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-12)))
    if not worst < _TOLERANCE:
        raise LowRankError(f"the exported network differs from the original by {worst:.1e}: nothing was written.")
    return worst


def _images(model: nn.Module, input_size: Sequence[int] | None, *, batch: int) -> Tensor:
    size = input_size or getattr(model, "input_size", None)
    if size is None:
        raise LowRankError("say the size of the images (channels, height, width) that the network takes.")
    device = next((parameter.device for parameter in model.parameters()), None)
    x = torch.randn(batch, *size, generator=torch.Generator().manual_seed(batch))
    return x.to(device, _dtype(model))


def _dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
