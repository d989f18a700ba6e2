"""The commands `lowrank convert`, `lowrank decompose` and `lowrank thin`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import lowrank_cnn as lr
from lowrank_cnn.cli.options import Json, Latency, Macs, Model, SourceOptions, grouped, option
from lowrank_cnn.cli.show import print_json, print_table
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowrank_cnn.cli.source import Source

Where = Annotated[list[str] | None, option("Name, prefix or pattern of layers, or a kernel as 3x3; repeatable.")]
Stage = Annotated[list[int] | None, option("The convs of one stage, counted from 1 by map size; repeatable.")]
Params = Annotated[float | None, option("Keep at most this share of the parameters.")]
Costlier = Annotated[bool, option("Also rewrite layers that do not get cheaper.", "--allow-costlier")]
Out = Annotated[Path | None, option("Write the network: .safetensors, .onnx or .pt2.", "--out", "-o")]
IMAGES = 128
"""Images that `--images` uses: more change little."""


@grouped
def convert_command(
    model: Model,
    named: SourceOptions,
    scheme: Annotated[
        str | None, option("lr, lr-join, separable, mixture(...), ... Default: lr-join, or what a budget chooses.")
    ] = None,
    where: Where = None,
    stage: Stage = None,
    macs: Macs = None,
    params: Params = None,
    latency: Latency = None,
    allow_costlier: Costlier = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Rewrite the convolutions of any network with low-rank filters.

    The rewritten layers have fresh weights and need training. `lowrank decompose` keeps trained weights.

    Examples:

      lowrank convert vgg11-gmp --scheme lr
      lowrank convert model.py:make --input 3x32x32 --out net.safetensors
      lowrank convert torchvision:resnet18 --stage 2 --stage 3 --macs 0.5
    """
    source, size = named.find(model)
    how: dict[str, Any] = {"macs": macs, "params": params, "latency": latency, "allow_costlier": allow_costlier}
    if scheme is None and macs is None and params is None and latency is None:
        scheme = "lr-join"
    chosen = _where(where, stage, source.network, size)
    new = lr.convert(source.network, scheme, where=chosen, input_size=size, **how)
    # Fresh weights have learned no classes: the file keeps only the image size of the source.
    _finish(replace(source, trained=None), new, size, out, as_json)


@grouped
def decompose_command(
    model: Model,
    named: SourceOptions,
    scheme: Annotated[str, option("separable, cp, channel, lr-join, mixture(..., join), with m.")] = "separable",
    where: Where = None,
    stage: Stage = None,
    energy: Annotated[float | None, option("Keep this share of each layer's squared weights.")] = None,
    macs: Macs = None,
    params: Params = None,
    latency: Latency = None,
    images: Annotated[str | None, option("Also fit the layers' outputs on a few images of this data set.")] = None,
    by: Annotated[
        Literal["output", "accuracy"], option("With --images, layers compete by the output or by the accuracy.")
    ] = "output",
    allow_costlier: Costlier = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Approximate trained convolutions by low-rank filters.

    Each layer becomes the low-rank filters nearest to its weights. Fine-tune the result to recover accuracy.

    Examples:

      lowrank decompose runs/photos --macs 0.5 --out small.safetensors
      lowrank decompose nin --pretrained cifar10 --energy 0.9
      lowrank decompose runs/photos --macs 0.5 --images photos --by accuracy
    """
    source, size = named.find(model)
    if by == "accuracy" and not images:
        raise LowRankError("--by accuracy is measured on images of a data set: give --images.")
    how: dict[str, Any] = {"energy": energy, "macs": macs, "params": params, "latency": latency}
    if images:
        how["images"], labels = source.images(images, size, IMAGES)
        if by == "accuracy":
            how["evaluate"] = partial(_accuracy, images=how["images"], labels=labels)
    how |= {"where": _where(where, stage, source.network, size), "allow_costlier": allow_costlier}
    new = lr.decompose(source.network, scheme, input_size=size, **how)
    _finish(source, new, size, out, as_json)


@grouped
def thin_command(
    model: Model,
    named: SourceOptions,
    macs: Annotated[float | None, option("Keep about this share of the MACs.")] = None,
    channels: Annotated[float | None, option("Keep this share of every layer's channels instead.")] = None,
    multiple: Annotated[int, option("Round the channels to multiples of this.", min=1)] = 16,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Make a thinner network: fewer channels in every layer.

    All weights are fresh and need training: `lowrank train MODEL --thin 0.5` trains such a network.

    Examples:

      lowrank thin vgg11-gmp --macs 0.5
      lowrank thin model.py:make --input 3x32x32 --channels 0.5 -o n.safetensors
    """
    source, size = named.find(model)
    if (macs is None) == (channels is None):
        raise LowRankError("give the share to keep: --macs 0.5, or --channels 0.7.")
    new = lr.thin(source.network, macs=macs, width=channels, multiple=multiple, input_size=size)
    _finish(replace(source, trained=None), new, size, out, as_json)


def _finish(source: Source, new: nn.Module, size: tuple[int, ...], out: Path | None, as_json: bool) -> None:
    """Write the new network, and print its layers with their cost before and after."""
    from lowrank_cnn.method.rewrite import Conversion, change_of

    *costs, total = lr.conversion_costs(source.network, new, size)
    if out is not None:
        source.export(new, out, size)
    report, fitted = notes(new).conversion, notes(new).decomposition
    if report is None:  # it was made thinner
        old = source.network.get_submodule
        report = Conversion(
            tuple(change_of(c.name, old(c.name), new.get_submodule(c.name), "thin") for c in costs)
        )
    if as_json:
        about = {"costs": [vars(cost) for cost in (*costs, total)], "fitted": [row.to_dict() for row in fitted]}
        return print_json({"model": source.name, "input": list(size), **report.to_dict(), **about})

    lines = [(change.name, change.after, cost) for change, cost in zip(report.changed, costs, strict=True)]
    lines.append(("total", f"{total.macs_after / max(1, total.macs_before):.3f} of the MACs", total))
    energy = {row.name: f"{row.energy:.1%}" for row in fitted}
    rows = [
        (name, filters, si(cost.macs_before), si(cost.macs_after), si(cost.params_after), energy.get(name))
        for name, filters, cost in lines
    ]
    columns = ("layer", "<filters now", "MACs", "now", "params", "energy")
    print_table(f"{source.name}, {'x'.join(map(str, size))}", columns, rows)
    if report.kept:
        kept = [(layer.name, layer.layer, layer.reason) for layer in report.kept]
        print_table("Left as they were", ("layer", "<", "<why"), kept)
    return None


def _accuracy(network: nn.Module, *, images: Tensor, labels: Tensor) -> float:
    import torch

    with torch.no_grad():
        return float((network.eval()(images).argmax(1) == labels).double().mean())


def _where(
    patterns: list[str] | None, numbers: list[int] | None, network: nn.Module, size: tuple[int, ...]
) -> Any:
    """The argument `where` of `convert`: patterns, kernels such as 3x3 as pairs, and the layers of stages."""
    items = [tuple(map(int, p.split("x"))) if re.fullmatch(r"\d+x\d+", p) else p for p in patterns or []]
    found = lr.stages(network, size) if numbers else ()
    for number in numbers or []:
        if found and not 1 <= number <= len(found):
            raise LowRankError(
                f"the network has {counted(len(found), 'stage')}, counted from 1; there is no stage {number}."
            )
        items += found[number - 1] if found else ()  # without any stage, `convert` says why nothing is left
    return items if patterns or numbers else None
