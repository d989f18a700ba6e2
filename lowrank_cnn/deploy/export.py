"""Write a network to a file that other programs can run, and read it back without executing stored code.

| suffix       | holds                                                    | read back by `load` as           |
|--------------|----------------------------------------------------------|----------------------------------|
| .onnx        | the graph and the weights                                | a module that runs onnxruntime   |
| .pt2         | a `torch.export` program                                 | a module, if the file is trusted |
| .ts          | TorchScript, a trace                                     | a module, if the file is trusted |
| .safetensors | the weights, how to build the network around them, and   | the network itself, to train on  |
|              | its images' size, classes and preparation, where known   |                                  |

`deploy.engines` has a module for every format but the last; all formats store classes and preprocessing. `load`
also reads the directory of a training run, or one of its checkpoints. Before a file appears, it is run in its
engine and compared with the network, output by output. Composites are exported as parallel 2-D convs, so the
saving in multiply-accumulates is kept. A file is written whole or not at all.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, check_file, names_options, option
from lowrank_cnn.core.files import as_path, delete, replacing, why_not_written
from lowrank_cnn.core.notes import AsDict, note, notes
from lowrank_cnn.core.progress import progress
from lowrank_cnn.deploy.engines.request import ExportRequest, Layout, Precision, at_precision, request_for
from lowrank_cnn.deploy.engines.targets import PRETRAINED, engine_of, open_engine, suffixes, target_of
from lowrank_cnn.deploy.metadata import attach_metadata
from lowrank_cnn.deploy.optimize import Optimized, reoptimize
from lowrank_cnn.deploy.parity import EngineModel, parity
from lowrank_cnn.deploy.plan import objection_on
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.select import check_module, check_values
from lowrank_cnn.models.hub import resolve, save_pretrained
from lowrank_cnn.models.network_file import Stored, read_weights, write_weights
from lowrank_cnn.train.trained import Trained, load_checkpoint, trained_of

_ASIDE = f".tmp-export-{platform.node()}-"
"""The prefix of the temporary folders in which exports of this machine write."""


@dataclass(frozen=True)
class Exported(AsDict):
    """The file, its size, and its largest difference from the network, relative to the largest output."""

    path: str
    bytes: int
    error: float | None


@names_options(target="to", engine="to", file="path", out="path", size="input_size", example="example_input")
@unchanged()  # a forward may draw
@progress("export")
def export(
    model: nn.Module | Trained,
    path: str | Path,
    *,
    to: str | None = None,
    input_size: Sequence[int] | None = None,
    example_input: Any = None,
    dynamic: Sequence[str] | Mapping[str, Mapping[int, str]] = ("batch",),
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    preprocess: bool | Layout = False,
    precision: Precision | Literal["int8"] = "fp32",
    calibrate: Any = None,
    strips: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write `model`, in evaluation mode, in the format that the suffix of `path` names.

    - `to`: an engine ("onnx", "openvino", "ncnn", ...), for a file in the folder `path`; "pretrained" for the
      folder that `from_pretrained` reads.
    - `input_size`: (channels, height, width) of an image. Our own networks and the results of `load_checkpoint`
      know theirs.
    - `example_input`: for networks with other inputs: a tensor, a tuple of inputs, or a dictionary of keywords. A
      tuple may end in a dictionary of keywords. The outputs may be a tensor, a tuple, a list, a dictionary or a
      dataclass; each tensor in them gets a name ("logits", "hidden_states_0").
    - `dynamic`: the axes of any length: "batch", "height", "width" ("depth" for volumes, "length" for series). ()
      fixes all. {"image": {0: "batch"}} names axes by input.
    - `input_names`, `output_names`: replace the names of arguments and keys.
    - `opset`: of .onnx.
    - `preprocess`: include preprocessing in the graph of a trained network. It then takes uint8 images of the
      network's input size, [N, C, H, W] (True, "nchw") or [N, H, W, C] ("nhwc"). The graph does not scale images.
    - `precision`: "fp16" stores and computes in half precision. Inputs and outputs stay float32, unless the
      network itself is in half precision. "int8" calls `quantize` with the images in `calibrate`.
    - `strips`: in .onnx, 1x3 and 3x1 convs by the compiled operator of the package lowrank-strips, which is then
      needed to run the file too.

    A .safetensors of an optimised network keeps the chosen forms: `load` builds them again without measuring. The
    file of a trained network stores its preprocessing and classes: `evaluate` and `predict` accept it like the
    run.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> axes = ("batch", "height", "width")
    >>> export(net, "net.onnx", input_size=(3, 32, 32), dynamic=axes)  # doctest: +SKIP
    """
    if to == PRETRAINED:
        folder = save_pretrained(model.attach().network if isinstance(model, Trained) else model, path)
        return Exported(str(folder), sum(file.stat().st_size for file in folder.iterdir()), None)
    path = file_for(as_path(path), to)
    strips = strips or (to is not None and target_of(to).strips)
    if precision == "int8":
        other = {"example_input": example_input, "input_names": input_names, "output_names": output_names}
        for name, value in {**other, "opset": opset, "preprocess": preprocess, "strips": strips}.items():
            if value is not None and value is not False:
                raise LowRankError(f"int8 is written without {option(name)}: leave it out.")
        if calibrate is None:
            raise LowRankError(f"int8 needs images to set the ranges of activations: give {option('calibrate')}.")
        from lowrank_cnn.deploy.quantize import quantize

        return quantize(model, calibrate, path, input_size=input_size, dynamic=tuple(dynamic), overwrite=overwrite)
    _check_suffix(path)
    stored = stored_of(model, input_size)
    check_place(path, overwrite)  # before the work
    if strips and path.suffix != ".onnx":
        raise LowRankError(f"compiled strips run in ONNX Runtime: write an .onnx file, not {path.suffix}.")
    if path.suffix == ".safetensors":
        with replacing(path) as temporary:
            write_weights(temporary, _as_given(stored))
            temporary.chmod(0o644)  # safetensors writes for its owner alone
        return Exported(str(path), path.stat().st_size, None)
    names = {"inputs": input_names, "outputs": output_names}
    network, request = request_for(stored, example_input, dynamic, names, preprocess)
    request = at_precision(replace(request, opset=opset, strips=strips), engine_of(path), precision)
    return write_request(path, request, network, overwrite=overwrite)


def write_request(path: Path, request: ExportRequest, network: nn.Module, *, overwrite: bool = True) -> Exported:
    """Write the file, run it in its engine, compare it with the network, and move it to its place."""
    with placing(path, overwrite=overwrite) as aside:
        engine_of(path).write(aside, request)
        error = parity(aside, request, network)
        size = sum(file.stat().st_size for file in aside.parent.iterdir())
    return Exported(str(path), size, error)


@contextmanager
def placing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a path of this name in a temporary folder. At the end all files of that folder move next to `path`.

    A failure before that changes nothing there. If there are several files, the one at `path` refers to the
    others: it is removed first and placed last, so an interrupted move leaves no mixture of old and new files.
    """
    check_place(path, overwrite)
    _clear_leftovers(path.parent)
    about: Any = {"prefix": f"{_ASIDE}{os.getpid()}-", "dir": path.parent, "ignore_cleanup_errors": True}
    try:
        with tempfile.TemporaryDirectory(**about) as folder:
            yield Path(folder, path.name)
            files = sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name)
            for file in files:
                check_place(path.with_name(file.name), overwrite)
            if len(files) > 1:
                delete(path)
            for file in files:
                with replacing(path.with_name(file.name)) as temporary:
                    file.replace(temporary)
    except OSError as error:
        raise LowRankError(why_not_written(path, error)) from error


def _clear_leftovers(place: Path) -> None:
    """Remove the folders of exports from this machine whose processes were killed."""
    for left in place.glob(f"{glob.escape(_ASIDE)}*-*") if os.name == "posix" else ():
        with suppress(ValueError, PermissionError):  # another name, or the process of another user
            try:
                os.kill(int(left.name.split("-")[-2]), 0)
            except ProcessLookupError:
                shutil.rmtree(left, ignore_errors=True)


def load(path: str | Path, *, into: nn.Module | None = None, trusted: bool = False) -> nn.Module:
    """The network in a file that `export` wrote, or of a training run, in evaluation mode. Stored code is not run.

    `path` may also be a folder of `save_pretrained`, or `hf-hub:user/name`. `notes(network).input_size` is the
    size of the images that the network was exported for or trained on, if the file has it.

    - `into`: for the weights of a network that is not one of ours, that network, as it was before any conversion;
      it is left as it is.
    - `trusted`: needed for .pt2 and .ts, which torch reads by running parts of them.

    >>> net = lr.load("runs/photos")  # doctest: +SKIP
    """
    path = resolve(path)
    if path.is_dir() or (path.suffix in ("", ".json", ".safetensors") and path.with_suffix(".json").is_file()):
        trained = load_checkpoint(path, network=None if into is None else copy_with(into))
        note(trained.network, input_size=trained.input_size or None)
        return trained.network.eval()
    check_file(path)
    if path.suffix == ".safetensors":
        stored = read_weights(path, into=into)
        network = stored.network.eval()
        return network if stored.optimized is None else reoptimize(network, stored.optimized)
    _check_suffix(path)
    runner = open_engine(path, trusted=trusted)
    # A file that prepares its images takes other values than a module of torch's does.
    own = runner.module if "pixels" not in runner.metadata else None
    return attach_metadata(EngineModel(runner) if own is None else own, runner.metadata)


def file_for(path: Path, to: str | None, name: str = "net") -> Path:
    """The file to write: the path itself, or for an engine NAME.SUFFIX in the folder `path`, made if needed."""
    if to is None or path.suffix == (suffix := target_of(to).suffix):
        return path
    if path.exists() and not path.is_dir():
        raise LowRankError(f"{path} is a file: {option('to', to)} writes into a folder.")
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{name}{suffix}"


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a path that is taken, or has no directory."""
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; {option('overwrite', True)} replaces it.")
    if not path.parent.is_dir():
        raise LowRankError(f"there is no directory {path.parent} to write {path.name} into.")


def stored_of(model: nn.Module | Trained, input_size: Sequence[int] | None) -> Stored:
    """A network as files store it, with its image size, classes and preparation if they are known."""
    if isinstance(model, Trained):
        return model.stored(input_size)
    check_module(model)
    check_values(model)
    size = input_size or notes(model).input_size
    stored = Stored(model, tuple(size) if size else None, notes(model).training_card)
    trained = trained_of(stored)
    return replace(stored, input_size=trained.input_size) if trained and not size else stored


def _check_suffix(path: Path) -> None:
    if path.suffix not in (known := [*suffixes(), ".safetensors"]):
        hint = "" if path.suffix else f"; for a folder, give {option('to', 'onnx')} or another engine"
        raise LowRankError(f"a network's file ends in one of {', '.join(known)}, and {path.name} does not{hint}.")


def _as_given(stored: Stored) -> Stored:
    """An optimised network as a file of weights stores it: the original network, and the form chosen for it."""
    made = stored.network
    if not isinstance(made, Optimized) or made.given is None:
        return stored
    if len(made.example) > 1 or made.names:
        raise LowRankError(
            "a file keeps what optimize chose for networks of one input alone: export the network that it was "
            "given, and optimise it again after loading."
        )
    if reason := objection_on(made, made.given, *made.example):
        raise LowRankError(f"the network was changed since it was optimised ({reason}): optimise it again.")
    return replace(stored, network=made.given, optimized=made.chosen)
