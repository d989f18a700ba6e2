"""The command `lowrank export`: a network as a file for other programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.convert import export_source
from lowrank_cnn.cli.options import Inputs, Json, Model, Overwrite, Scheme, SourceOptions, grouped, option
from lowrank_cnn.cli.show import console, print_json
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    import torch

    from lowrank_cnn.cli.source import Source


@dataclass(frozen=True)
class GraphOptions:
    """The graph in the file, its precision and its names."""

    precision: Annotated[Literal["fp32", "fp16", "int8"], option("int8 needs --calibrate.")] = "fp32"
    calibrate: Annotated[
        str | None, option("For int8: a folder or data set; or path.py:function, which gives prepared images.")
    ] = None
    merged: Annotated[bool, option("Fold batch norms into the layers before them.", "--merge")] = False
    chains: Annotated[
        bool, option("Merge basis + join and separable pairs into dense convs too.", "--merge-chains")
    ] = False
    dynamic: Annotated[str, option("Axes of any length: batch, height, width, joined by commas; or none.")] = (
        "batch"
    )
    opset: Annotated[int | None, option("Of .onnx.")] = None
    strips: Annotated[
        bool, option("In .onnx: 1x3 and 3x1 convs by the operator of lowrank-strips.", "--strips")
    ] = False
    input_names: Annotated[
        str | None, option("Names of the inputs, joined by commas; by default those of the forward.")
    ] = None
    output_names: Annotated[
        str | None, option("Names of the outputs, joined by commas; by default their keys.")
    ] = None
    preprocess: Annotated[
        Literal["nchw", "nhwc"] | None,
        option("Prepare images inside the graph, which then takes uint8 in this layout; not resize."),
    ] = None

    def for_export(self) -> dict[str, Any]:
        """These options as `export` takes them."""
        free = () if self.dynamic == "none" else tuple(self.dynamic.split(","))
        names = {"input_names": self.input_names, "output_names": self.output_names}
        graph = {"dynamic": free, "opset": self.opset, "preprocess": self.preprocess or False}
        graph |= {option: text.split(",") if text else None for option, text in names.items()}
        return {"precision": self.precision, "strips": self.strips, **graph}

    def merge(self, network: torch.nn.Module, inputs: Any) -> torch.nn.Module:
        """The network with batch norms, and chains if asked, folded into the layers before them."""
        from lowrank_cnn.cli.source import random_images
        from lowrank_cnn.core.modules import is_example

        if not (self.merged or self.chains):
            return network
        example = inputs if is_example(inputs) else random_images(network, inputs, 2, "cpu")
        return lr.merge(network.eval(), chains=self.chains or None, example_input=example)


@grouped
def export_command(
    model: Model,
    named: SourceOptions,
    graph: GraphOptions,
    path: Annotated[
        Path | None, typer.Argument(help="A file, whose suffix says the format: net.onnx, net.safetensors, ...")
    ] = None,
    out: Annotated[
        Path | None, option("The file; or with --to the directory, made if needed.", "--out", "-o")
    ] = None,
    to: Annotated[
        str | None,
        option("An engine (onnx, openvino, ncnn, ...): write its file into a directory; or pretrained, to share."),
    ] = None,
    scheme: Scheme = None,
    example: Inputs = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a network for ONNX Runtime and other engines, and check the file.

    The file is run on random images and compared with the network. The file of a trained network holds its
    classes and preprocessing: evaluate, predict and time accept it like a run.

    Examples:

      lowrank export nin-c3-lr net.onnx --pretrained cifar10
      lowrank export runs/photos net.onnx --merge --preprocess nhwc
      lowrank export model.py:make net.pt2 --scheme lr --input 3x32x32
      lowrank export runs/photos -o phone --to ncnn --precision fp16
      lowrank export runs/photos net.onnx --precision int8 --calibrate photos
      lowrank export model.py:make net.onnx --example model.py:inputs
    """
    from lowrank_cnn.deploy.engines.targets import PRETRAINED, target_of

    if to not in (None, PRETRAINED) and target_of(to).strips:
        graph = replace(graph, strips=True)
    path = _place(path, out, to, model)
    source, inputs = named.find(model, example)
    source = source.converted(scheme) if scheme else source
    network = graph.merge(source.network, inputs)
    if to == PRETRAINED:
        folder = export_source(source, network, path, inputs, to=to).path
        return print_json({"path": folder}) if as_json else console.print(f" {folder} is for lr.from_pretrained.")
    if graph.precision == "int8":
        return _export_int8(source, network, path, graph, inputs, overwrite=overwrite, as_json=as_json)
    written = export_source(source, network, path, inputs, overwrite=overwrite, **graph.for_export())
    macs = {"before": lr.count(source.network, inputs).macs, "after": lr.count(network, inputs).macs}
    rows = notes(network).merging
    if as_json:
        return print_json({**written.to_dict(), "macs": macs, "merging": [row.to_dict() for row in rows]})
    if graph.merged or graph.chains:
        _print_merging(rows, macs)
    checked = "" if written.error is None else f", off by {written.error:.0e} at most"
    console.print(f" {written.path}: {si(written.bytes)}B{checked}.")
    if to:
        _print_usage(path, source.name, macs=macs["after"], error=written.error, precision=graph.precision)
    return None


def _print_merging(rows: Any, macs: dict[str, int]) -> None:
    folded = sum(row.error is not None for row in rows)
    console.print(
        f" {counted(folded, 'layer')} merged; {si(macs['before'])} MACs before, {si(macs['after'])} after."
    )
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            label = "Not merged" if row.error is None else "Noted"
            said.setdefault(f"{label} ({row.reason})", []).append(row.name)
    for what, names in said.items():
        console.print(f" {what}: {', '.join(names)}.")


def _place(path: Path | None, out: Path | None, to: str | None, model: str) -> Path:
    """The file to write: as given, or in the directory that --to takes."""
    from lowrank_cnn.deploy.engines.targets import PRETRAINED
    from lowrank_cnn.deploy.export import file_for

    given = path or out
    if given is None or (path and out):
        raise LowRankError("say once where to write: a file (net.onnx), or a directory with --to.")
    name = Path(model.rpartition(":")[2]).stem or "net"
    return given if to == PRETRAINED else file_for(given, to, name)


def _export_int8(
    source: Source,
    network: torch.nn.Module,
    path: Path,
    graph: GraphOptions,
    size: Any,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantise, and print the accuracy before and after and the layers that stay in float."""
    import torch

    from lowrank_cnn.cli.source import find_example
    from lowrank_cnn.core.modules import is_example

    if is_example(size):
        raise LowRankError("int8 is for networks of one image: give --input in place of --example.")
    model: Any = network if source.trained is None else replace(source.trained, network=network)
    images: Any = graph.calibrate
    if images and ".py:" in images:
        model, images = network, find_example(images, option="--calibrate")
        if not isinstance(images, torch.Tensor):
            kind = type(images).__name__
            raise LowRankError(f"{graph.calibrate} must give images as a tensor [N, C, H, W], not {kind}.")
    elif images and source.trained is None:
        raise LowRankError(
            "int8 with a data set is for a trained network (a run, an exported file, --pretrained): for others "
            "give --calibrate path.py:function, which gives prepared images."
        )
    how: dict[str, Any] = {**graph.for_export(), "overwrite": overwrite}
    found: Any = lr.export(model, path, calibrate=images, input_size=None if model is not network else size, **how)
    if as_json:
        return print_json(found.to_dict())
    console.print(f" {found.path}: {si(found.bytes)}B.")
    told = "accuracy not measured: the images have no labels"
    if found.before is not None:
        told = (
            f"top-1 {found.before:.2%} before, {found.after:.2%} in int8, on {counted(found.images, 'test image')}"
        )
    console.print(f" {told}.")
    kept = ", ".join(found.in_float) or "none"
    console.print(f" Layers that stay in float: {kept}.")
    macs = lr.count(network, size).macs
    return _print_usage(path, source.name, macs=macs, error=found.error, precision="int8", accuracy=told)


def _print_usage(path: Path, name: str, **about: Any) -> None:
    """Write the card beside the file, and print how to run it."""
    from lowrank_cnn.deploy.engines.targets import open_engine, usage, write_export_card

    card = write_export_card(path, name, **about)
    console.print(f" {card} says what it takes. To run it:")
    runner = open_engine(path, trusted=True)
    for line in usage(runner, path, precision=about["precision"]).splitlines():
        console.print(f"   {line}", soft_wrap=True)
