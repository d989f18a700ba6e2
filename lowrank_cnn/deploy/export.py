"""Write a network to a file that others can run, and read it back without running anything stored in it.

| suffix       | holds                                                    | read back by `load` as           |
|--------------|----------------------------------------------------------|----------------------------------|
| .onnx        | the graph and the weights                                | a module that runs onnxruntime   |
| .pt2         | a `torch.export` program                                 | a module, if the file is trusted |
| .ts          | TorchScript, a trace                                     | a module, if the file is trusted |
| .safetensors | the weights, how to build the network around them, and   | the network itself, to train on  |
|              | its images' size, classes and preparation, where known   |                                  |

`deploy.engines` has a row for every format but the last; all of them carry classes and preparation too.
`load` also reads the directory of a training run, or one of its checkpoints. A graph runs in its engine and is
compared with the network, output by output, before the file appears. Composites stay 2-D convs side by side, so
the saving in multiply-accumulates is kept. A file is written whole or not at all.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from lowrank_cnn.core import __version__
from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import as_path, delete, replacing, why_not_written
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.progress import progress
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.block_forms import in_layers
from lowrank_cnn.deploy.engines.request import Axes, Call, ExportRequest, Precision, at_precision, free_axes
from lowrank_cnn.deploy.engines.targets import ENGINES, check_trusted, engine_of, open_engine
from lowrank_cnn.deploy.optimize import Optimized, reoptimize
from lowrank_cnn.deploy.parity import EngineModel, checked_outputs, parity
from lowrank_cnn.deploy.plan import objection_on
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.select import check_module, check_values
from lowrank_cnn.models.build import name_of
from lowrank_cnn.models.hub import resolve
from lowrank_cnn.models.network_file import Stored, dtype_of, read_weights, write_weights
from lowrank_cnn.train.trained import Trained, load_checkpoint, trained_of

# What an exported file says beside its graph: its classes, and how images are prepared.
#
# | key          | value, as JSON                                                                     |
# |--------------|------------------------------------------------------------------------------------|
# | lowrank_cnn  | the version that wrote the file                                                    |
# | input_size   | channels, height and width of what the network sees                                |
# | classes      | the names of the outputs                                                           |
# | mean, std    | per channel, in pixel values of 0 to 255                                           |
# | resize       | the shorter side is first brought to this length; null where it is not             |
# | crop         | then the centre of this height and width is cut out                                |
# | pixels       | "nchw" or "nhwc" where the graph itself prepares images: it takes uint8            |
# | image        | the size of the images in training, or empty where they differed in size           |
# | held_out     | which images of its set training held out, where the set came without test images  |
# | recipe       | the training recipe                                                                |
# | whitening    | the tensors of ZCA whitening, where images were whitened: safetensors in base64    |

METADATA = ("input_size", "classes", "image", "recipe", "pixels", "held_out")


def metadata_of(stored: Stored, *, pixels: str | None = None) -> dict[str, str]:
    """All that is known of a network, for its file; `pixels` is the layout of the images it prepares itself."""
    found: dict[str, Any] = {"lowrank_cnn": __version__, "input_size": stored.input_size, "pixels": pixels}
    if (trained := trained_of(stored)) is not None:
        standardized = stored.preprocess.keys() == {"mean", "std"}
        recipe = trained.recipe.to_dict()
        if pixels and not standardized:
            recipe |= {"crop": None, "resize": None}  # the graph whitens whole images, and crops behind that
        found |= {"classes": trained.classes, "image": trained.image, "recipe": recipe}
        found |= {"resize": trained.augment.resize, "crop": trained.input_size[1:]}
        found["held_out"] = dict(trained.held_out) or None
        if standardized:
            found |= {name: tensor.tolist() for name, tensor in stored.preprocess.items()}
        elif not pixels:
            packed = tensors_to_bytes({name: tensor.contiguous() for name, tensor in stored.preprocess.items()})
            found["whitening"] = base64.b64encode(packed).decode()
    return {key: json.dumps(value) for key, value in found.items() if value is not None}


def attach_metadata(network: nn.Module, metadata: Mapping[str, str]) -> nn.Module:
    """Let a network out of a file carry what the file says of its images; a file of others says nothing."""
    said = {key: _value(metadata.get(key)) for key in METADATA}
    size = said["input_size"]
    if isinstance(size, list) and all(isinstance(side, int) for side in size):
        note(network, input_size=tuple(size))
    if said["classes"] is None or said["recipe"] is None:
        return network
    held_out = said["held_out"] if isinstance(said["held_out"], dict) else {}
    data = {**held_out, "classes": said["classes"], "image": said["image"] or []}
    card = {"recipe": said["recipe"], "data": data}
    preprocess = _as_pixels(size) if said["pixels"] else _preprocess(metadata)
    try:
        trained_of(Stored(network, None, card, preprocess))  # which attaches the card to the network
    except (ValueError, AttributeError) as error:
        raise LowRankError("the file's metadata is damaged: export the network again.") from error
    return network


class PreparedNetwork(nn.Module):
    """A network that takes uint8 images of the size it sees, and prepares them itself; scaling stays outside.

    Whitening is of whole images, so where images were whitened the crop behind it is inside too.
    """

    def __init__(self, trained: Trained, layout: str) -> None:
        super().__init__()
        self.network, self.prepare, self.layout = trained.network, trained.preprocess, layout
        self.window = trained.input_size[1:]
        note(self, name=name_of(trained.network))  # refusals speak of the user's network

    def forward(self, image: Tensor) -> Any:
        pixels = image.permute(0, 3, 1, 2) if self.layout == "nhwc" else image
        prepared = self.prepare(pixels)
        top, left = ((prepared.shape[2 + axis] - self.window[axis]) // 2 for axis in (0, 1))
        seen = prepared[:, :, top : top + self.window[0], left : left + self.window[1]]
        like = next(iter(self.network.parameters()), seen)
        return self.network(seen.to(like.dtype))


def _as_pixels(size: Any) -> dict[str, Tensor]:
    """The preparation of images for a graph that prepares them itself: none."""
    channels = size[0] if isinstance(size, list) and size and isinstance(size[0], int) else 3
    return {"mean": torch.zeros(channels), "std": torch.ones(channels)}


def _preprocess(metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that images are prepared with."""
    try:
        if "whitening" in metadata:
            return tensors_from(base64.b64decode(_value(metadata["whitening"]), validate=True))
        return {name: torch.tensor(_value(metadata[name]), dtype=torch.float32) for name in ("mean", "std")}
    except (KeyError, TypeError, ValueError, binascii.Error, SafetensorError) as error:
        raise LowRankError("the file does not say how images are prepared: export the network again.") from error


def _value(text: str | None) -> Any:
    """A value out of JSON; None where it is absent or damaged."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


# Prepare an export: from a network and options, the example call, names, axes and metadata that writers take.

Layout = Literal["nchw", "nhwc"]
"""Axes of a batch of uint8 images: [N, C, H, W] or [N, H, W, C]."""


def request_for(
    stored: Stored,
    example: Any = None,
    dynamic: Any = ("batch",),
    names: Mapping[str, Sequence[str] | None] = MappingProxyType({}),
    preprocess: bool | Layout = False,
) -> tuple[nn.Module, ExportRequest]:
    """The network that the file is compared with, and the request for its writer, both on the CPU."""
    network = copy_with(stored.network).eval().cpu()
    if isinstance(network, Optimized):
        network.forget()  # compiled code stays behind; it would be compiled anew for every size that is compared
    layout: Layout | None = "nchw" if preprocess is True else preprocess or None
    if layout:
        network, example = _prepared(replace(stored, network=network), layout, example)
    example = _images(stored) if example is None else example
    call = Call.of(network, example, names.get("inputs"))
    call = call.replaced({name: tensor.detach().cpu() for name, tensor in call.tensors.items()})
    found = checked_outputs(network, call)
    outputs = _output_names(found, call.names, names.get("outputs"))
    axes = free_axes(call, dynamic)
    results = dict(zip(outputs, found.values(), strict=True))
    metadata = metadata_of(stored, pixels=layout) | {
        "inputs": _described(call.tensors, axes),
        "outputs": _described(results, {name: {} for name in results}, fixed=not any(axes.values())),
    }
    return network, ExportRequest(in_layers(network).eval(), call, outputs, axes, metadata=metadata)


def _prepared(stored: Stored, layout: Layout, example: Any) -> tuple[nn.Module, Tensor]:
    """A trained network that prepares its images itself, and uint8 images of the size that it then takes."""
    trained = trained_of(stored)
    if layout not in ("nchw", "nhwc"):
        raise LowRankError(f"preprocess is True, 'nchw' or 'nhwc', not {layout!r}.")
    if trained is None or example is not None:
        raise LowRankError(
            "preprocess is for a trained network of images, which knows how they are prepared: give a run, or "
            "what load or fit made, and no example_input."
        )
    whole = trained.image if trained.preprocess.to_dict().keys() != {"mean", "std"} else trained.input_size
    drawn = torch.randint(0, 256, (2, *whole), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    network = PreparedNetwork(trained, layout).eval()
    return network, drawn.permute(0, 2, 3, 1).contiguous() if layout == "nhwc" else drawn


def _images(stored: Stored) -> Tensor:
    if stored.input_size is None:
        raise LowRankError(
            "say the size of the images (channels, height, width) that the network takes, or give example_input."
        )
    drawn = torch.randn(2, *stored.input_size, generator=torch.Generator().manual_seed(2))
    return drawn.to(dtype_of(stored.network))


def _output_names(
    found: Mapping[str, Tensor], inputs: Sequence[str], asked: Sequence[str] | None
) -> tuple[str, ...]:
    if asked is None:
        return tuple(f"output_{name}" if name in inputs else name for name in found)
    if len(asked) != len(found) or len({*asked, *inputs}) != len(asked) + len(inputs):
        raise LowRankError(
            f"the network gives {counted(len(found), 'output')} ({', '.join(found)}): give as many different "
            "output_names."
        )
    return tuple(asked)


def _described(tensors: Mapping[str, Tensor], axes: Axes, *, fixed: bool = True) -> str:
    """Names, shapes and types for formats that keep none; of results with free axes, no lengths."""
    rows = []
    for name, tensor in tensors.items():
        shape = [axes[name].get(axis, size if fixed else None) for axis, size in enumerate(tensor.shape)]
        rows.append({"name": name, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch.")})
    return json.dumps(rows)


@dataclass(frozen=True)
class Exported:
    """The file, its size, and its largest difference from the network, relative to the output where that is."""

    path: str
    bytes: int
    error: float | None

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@unchanged()  # a forward may draw
@progress("export")
def export(
    model: nn.Module | Trained,
    path: str | Path,
    *,
    input_size: Sequence[int] | None = None,
    example_input: Any = None,
    dynamic: Sequence[str] | Mapping[str, Mapping[int, str]] = ("batch",),
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    preprocess: bool | Layout = False,
    precision: Precision = "fp32",
    strips: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write `model`, as it is in evaluation, in the format that the suffix of `path` names.

    - `input_size`: (channels, height, width) of an image. Our own networks know theirs, and so does what
      `load_checkpoint` gives.
    - `example_input`: for a network that takes anything else: a tensor, a tuple of inputs, or a dictionary of
      keywords. A tuple may end in a dictionary of keywords. The outputs may be a tensor, a tuple, a list, a
      dictionary or a dataclass; each tensor in them gets a name ("logits", "hidden_states_0").
    - `dynamic`: the axes of any length: "batch", "height", "width" (of volumes "depth", of series "length"). ()
      fixes all. {"image": {0: "batch"}} names axes by input.
    - `input_names`, `output_names`: in place of the names of arguments and keys.
    - `opset`: of .onnx.
    - `preprocess`: put the preparation of images into the graph, for a trained network. It then takes uint8 images
      of the size that the network sees, [N, C, H, W] (True, "nchw") or [N, H, W, C] ("nhwc"). Scaling an image to
      that size stays outside.
    - `precision`: "fp16" stores and computes in half precision. Inputs and outputs stay float32, except where the
      network itself is in half precision. `lr.quantize` writes int8.
    - `strips`: in .onnx, 1x3 and 3x1 convs by the compiled operator of the package lowrank-strips, which is then
      needed to run the file too.

    What `optimize` gave goes to a .safetensors with what was chosen, and `load` makes it again without measuring.
    A file of a trained network says how its images are prepared and what its classes are: `evaluate` and `predict`
    take it as they take the run.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> axes = ("batch", "height", "width")
    >>> export(net, "net.onnx", input_size=(3, 32, 32), dynamic=axes)  # doctest: +SKIP
    """
    path = as_path(path)
    if path.suffix != ".safetensors":
        _check_suffix(path)
    stored = stored_of(model, input_size)
    check_place(path, overwrite)  # before the work
    if strips and path.suffix != ".onnx":
        raise LowRankError(f"compiled strips run in ONNX Runtime: write an .onnx file, not {path.suffix}.")
    if path.suffix == ".safetensors":
        return _write_weights(path, _as_given(stored))
    names = {"inputs": input_names, "outputs": output_names}
    network, request = request_for(stored, example_input, dynamic, names, preprocess)
    request = replace(request, opset=opset, strips=strips)
    return write_request(path, at_precision(request, path.suffix, precision), network, overwrite=overwrite)


def write_request(path: Path, request: ExportRequest, network: nn.Module, *, overwrite: bool = True) -> Exported:
    """Write what is asked for, run it in its engine, compare it with the network, and move it to its place."""
    module, _, writer = engine_of(path)
    write = getattr(importlib.import_module(f"lowrank_cnn.deploy.engines.{module}"), writer)
    with placing(path, overwrite=overwrite) as aside:
        try:
            error = parity(write(aside.parent, path.stem, request), request, network)
        except OSError as failure:
            raise LowRankError(why_not_written(path, failure)) from failure
        size = sum(file.stat().st_size for file in aside.parent.iterdir())
    return Exported(str(path), size, error)


@contextmanager
def placing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path of this name in a folder aside. At the end all files in that folder move beside `path`.

    Until then nothing is changed there, whatever fails. Of several files, the one at `path` names the others: it
    goes first and comes last, so that an interrupted move leaves no mixture of old and new ones.
    """
    check_place(path, overwrite)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=path.parent))
    except OSError as error:
        raise LowRankError(why_not_written(path, error)) from error
    try:
        yield folder / path.name
        files = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
        for file in files:
            check_place(path.with_name(file.name), overwrite)
        if len(files) > 1:
            delete(path)
        for file in files:
            with replacing(path.with_name(file.name)) as temporary:
                file.replace(temporary)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    if path.suffix == ".safetensors":
        stored = read_weights(path, into=into)
        network = stored.network.eval()
        return network if stored.optimized is None else reoptimize(network, stored.optimized)
    _check_suffix(path)
    check_trusted(path, trusted)
    runner = open_engine(path, trusted=trusted)
    # A file that prepares its images takes other values than a module of torch's does.
    own = runner.module if "pixels" not in runner.metadata else None
    network = EngineModel(runner) if own is None else own
    return attach_metadata(network, runner.metadata)


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a path that is taken, or has no directory."""
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; overwrite=True (--overwrite) replaces it.")
    if not path.parent.is_dir():
        raise LowRankError(f"there is no directory {path.parent} to write {path.name} into.")


def stored_of(model: nn.Module | Trained, input_size: Sequence[int] | None) -> Stored:
    """What a file keeps of a network: itself, and its images, classes and preparation where known."""
    if isinstance(model, Trained):
        return model.stored(input_size)
    check_module(model)
    check_values(model)
    size = input_size or notes(model).input_size
    stored = Stored(model, tuple(size) if size else None)
    if (carried := notes(model).training_card) is None:
        return stored
    stored = replace(stored, card=carried.card, preprocess=dict(carried.preprocess))
    trained = trained_of(stored)
    return replace(stored, input_size=trained.input_size) if trained and not size else stored


def _check_suffix(path: Path) -> None:
    if path.suffix not in ENGINES:
        known = ", ".join([*ENGINES, ".safetensors"])
        folder = "" if path.suffix else "; for a folder, the command takes --to onnx or another target"
        raise LowRankError(f"a network's file ends in one of {known}, and {path.name} does not{folder}.")


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


def _write_weights(path: Path, stored: Stored) -> Exported:
    try:
        with replacing(path) as temporary:
            write_weights(temporary, stored)
            temporary.chmod(0o644)  # safetensors writes for its owner alone
    except SafetensorError as failure:
        raise LowRankError(f"{path} could not be written ({failure}).") from failure
    return Exported(str(path), path.stat().st_size, None)
