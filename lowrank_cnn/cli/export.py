"""The command `lowrank export`: a network as a file for other programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.options import Inputs, Json, Model, Overwrite, Scheme, SourceOptions, grouped, option
from lowrank_cnn.cli.show import console, print_json
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted, si


@dataclass(frozen=True)
class GraphOptions:
    """The graph in the file, its precision and its names."""

    precision: Annotated[Literal["fp32", "fp16", "int8"], option("int8 needs --calibrate.")] = "fp32"
    calibrate: Annotated[str | None, option("For int8: data set, or path.py:function of prepared images.")] = None
    merged: Annotated[bool, option("Fold batch norms into the layers before them.", "--merge")] = False
    chains: Annotated[bool, option("Merge basis + join and separable pairs to a conv.", "--merge-chains")] = False
    dynamic: Annotated[str, option("Axes of any length, as batch,height,width; or none.")] = "batch"
    opset: Annotated[int | None, option("Of .onnx.")] = None
    strips: Annotated[bool, option("In .onnx: 1x3 and 3x1 convs by lowrank-strips.", "--strips")] = False
    input_names: Annotated[str | None, option("Names of the inputs, joined by commas; else the forward's.")] = None
    output_names: Annotated[str | None, option("Names of the outputs, joined by commas; else their keys.")] = None
    preprocess: Annotated[
        Literal["nchw", "nhwc"] | None, option("Prepare images in the graph: uint8 in this layout, not resized.")
    ] = None

    def for_export(self) -> dict[str, Any]:
        """These options as `export` takes them."""
        free = () if self.dynamic == "none" else tuple(self.dynamic.split(","))
        names = {"input_names": self.input_names, "output_names": self.output_names}
        graph = {"dynamic": free, "opset": self.opset, "preprocess": self.preprocess or False}
        graph |= {option: text.split(",") if text else None for option, text in names.items()}
        return {"precision": self.precision, "strips": self.strips, **graph}


@grouped
def export_command(
    model: Model,
    named: SourceOptions,
    graph: GraphOptions,
    path: Annotated[Path | None, typer.Argument(help="A file; its suffix sets the format (.onnx).")] = None,
    out: Annotated[Path | None, option("The file; or with --to the directory.", "--out", "-o")] = None,
    to: Annotated[
        str | None, option("Write for an engine (onnx, ncnn, ...) into a directory; or pretrained, to share.")
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
    from lowrank_cnn.cli.source import find_example, placed
    from lowrank_cnn.deploy.engines.targets import PRETRAINED, open_engine, target_of, usage, write_export_card

    path = _place(path, out, to, model)
    source, inputs = named.find(model, example)
    source = source.converted(scheme) if scheme else source
    network = source.network
    if graph.merged or graph.chains:
        _, network, batch = placed(network, inputs, 2, "cpu")
        network = lr.merge(network, chains=graph.chains or None, example_input=batch)
    if to == PRETRAINED:
        folder = source.export(network, path, inputs, to=to).path
        return print_json({"path": folder}) if as_json else console.print(f" {folder} is for lr.from_pretrained.")
    if to is not None and target_of(to).strips:
        graph = replace(graph, strips=True)
    how, int8 = graph.for_export(), graph.precision == "int8"
    if int8 and graph.calibrate:
        how["calibrate"] = graph.calibrate
        if ".py:" in graph.calibrate:  # prepared images, for the network alone
            source = replace(source, trained=None)
            how["calibrate"] = find_example(graph.calibrate, option="--calibrate")
        elif source.trained:
            how["input_size"] = None  # that of its images, prepared as in training
    written: Any = source.export(network, path, inputs, overwrite=overwrite, **how)
    macs = {"before": lr.count(source.network, inputs).macs, "after": lr.count(network, inputs).macs}
    rows = notes(network).merging
    if as_json:
        return print_json({**written.to_dict(), "macs": macs, "merging": [row.to_dict() for row in rows]})
    if graph.merged or graph.chains:
        _print_merging(rows, macs)
    checked = "" if int8 or written.error is None else f", off by {written.error:.0e} at most"
    console.print(f" {written.path}: {si(written.bytes)}B{checked}.")
    about = {"macs": macs["after"], "error": written.error, "precision": graph.precision}
    if int8:
        about["accuracy"] = "accuracy not measured: the images have no labels"
        if written.before is not None:
            images = counted(written.images, "test image")
            about["accuracy"] = f"top-1 {written.before:.2%} before, {written.after:.2%} in int8, on {images}"
        console.print(f" {about['accuracy']}.")
        console.print(f" Layers that stay in float: {', '.join(written.in_float) or 'none'}.")
    if int8 or to:
        console.print(f" {write_export_card(path, source.name, **about)} says what it takes. To run it:")
        for line in usage(open_engine(path, trusted=True), path, precision=graph.precision).splitlines():
            console.print(f"   {line}", soft_wrap=True)
    return None


def _print_merging(rows: Any, macs: dict[str, int]) -> None:
    merged = counted(sum(row.error is not None for row in rows), "layer")
    console.print(f" {merged} merged; {si(macs['before'])} MACs before, {si(macs['after'])} after.")
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
