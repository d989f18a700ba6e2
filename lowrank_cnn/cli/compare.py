"""The commands `lowrank compare`, `lowrank demo` and `lowrank design`, which is compare without images."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import lowrank_cnn as lr
from lowrank_cnn.cli import options as opt
from lowrank_cnn.cli.options import IMAGES, TRAINING, ImageOptions, Json, Model, SourceOptions, grouped, option
from lowrank_cnn.cli.show import console, errors, print_json, print_table, resumable
from lowrank_cnn.core.errors import LowRankError

if TYPE_CHECKING:
    from lowrank_cnn.choose.compare import Comparison


@grouped
def compare_command(
    *,
    model: Model,
    named: SourceOptions,
    data: Annotated[str | None, option("Images to train on; else times alone advise.", panel=IMAGES)] = None,
    out: Annotated[Path | None, option("Folder of the runs, the record, picture and page.", "--out", "-o")] = None,
    minutes: Annotated[float | None, option("Minutes to spend; the default is printed at the start.")] = None,
    target: Annotated[str, option("Where it runs: cpu, cuda, onnxruntime:int8, ncnn:fp16, ...", "--for")] = "auto",
    at_most: Annotated[str | None, option("The time it may take, as 3ms.")] = None,
    at_least: Annotated[str | None, option("The accuracy it must reach, as 90%.")] = None,
    scheme: Annotated[list[str] | None, option("A low-rank design to compare; repeatable.", "--scheme")] = None,
    recipe: Annotated[str | None, option("Another recipe than the images suggest.", panel=TRAINING)] = None,
    settings: opt.Settings = None,
    batch: Annotated[int | None, option("Images per timed batch: 1, or 256 on a GPU.", min=1, max=10**6)] = None,
    macs: opt.Macs = None,
    device: opt.Device = "auto",
    reading: ImageOptions,
    as_json: Json = False,
) -> None:
    """Say which cheap version of a network to train.

    Dense, thinner and low-rank ones are trained on your images within a budget of time, and timed where they will
    run. The answer is one sentence; --out holds a picture, a page, every run, and the winner, ready for
    `lowrank export`. A command that was killed continues when it is started again.

    Examples:

      lowrank compare mynet.py:make_model --data photos --minutes 20 -o out
      lowrank compare timm:resnet18 --data photos --for ncnn:fp16 --at-most 3ms
      lowrank compare vgg11-gmp --macs 0.4
    """
    if data is None:
        from lowrank_cnn.choose.target import Target

        if at_most or at_least or minutes or out:
            raise LowRankError("--at-most, --at-least, --minutes and --out are for training: add --data.")
        place = Target.parse(target, device)
        how: dict[str, Any] = {"engine": place.engine or "torch", "precision": place.precision or None}
        how["macs"] = 0.5 if macs is None else macs
        return _advise(model, named, batch or place.batch, place.device, as_json, other="--for", **how)
    from lowrank_cnn.cli.source import remember
    from lowrank_cnn.data import open_data
    from lowrank_cnn.train.recipe import parse_settings

    if macs is not None:
        raise LowRankError("--macs is for advice without --data: give --at-most or --at-least.")
    times = {"ms": 1.0, "us": 1e-3, "s": 1e3}
    reach = _quantity(at_least, "--at-least", "an accuracy such as 90%", {"%": 0.01})
    fields: dict[str, Any] = parse_settings(settings or [])
    folder = out or Path("runs") / f"compare-{re.sub(r'[^A-Za-z0-9.]+', '-', model).strip('-')}"
    with resumable():
        found = lr.compare(
            model,
            data if reading == ImageOptions() else open_data(data, **vars(reading)),
            out=folder,
            minutes=minutes,
            for_=target,
            at_most=_quantity(at_most, "--at-most", "a time such as 3ms", times),
            at_least=reach / 100 if reach and reach > 1 else reach,
            schemes=scheme or (),
            batch=batch,
            recipe=recipe,
            pretrained=named.pretrained or False,
            device=device,
            **fields,
        )
    remember(model, found.winner, *(found.folder / "runs").iterdir())
    return print_json(found.to_dict()) if as_json else print_comparison(found)


def print_comparison(found: Comparison) -> None:
    """Print the table, the sentence, what would make it more certain, and where everything is."""
    print_table("Dense, thin and low-rank", *found.rows())
    console.print(found.sentence, soft_wrap=True)
    for remark in found.remarks:
        console.print(remark, soft_wrap=True)
    for name, path in (("The picture", found.picture), ("The page", found.page), ("To export", found.winner)):
        if path is not None:
            console.print(f"{name}: {path}", soft_wrap=True)


def _quantity(text: str | None, option: str, example: str, units: dict[str, float]) -> float | None:
    """A number with one of these units, or without."""
    if text is None:
        return None
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(units)})?", text.strip())
    if not found:
        raise LowRankError(f"{option} is {example}, not {text!r}.")
    return float(found[1]) * units.get(found[2], 1.0)


WIDTH, STRIDE, MINUTES = 0.25, 2, 2.5


def demo_command(
    out: Annotated[Path, option("Folder of all that the demo writes.", "--out", "-o")] = Path("runs/demo"),
    epochs: Annotated[int | None, option("Train this many epochs instead of the recipe's.")] = None,
    device: opt.Device = "auto",
    limit: opt.Limit = None,
    as_json: Json = False,
) -> None:
    """Compare a dense network with a thinner and a low-rank one on digits.

    It takes two to three minutes on two CPU cores and downloads nothing.

    Examples:

      lowrank demo
      lowrank demo --epochs 1 --out runs/quick
    """
    from lowrank_cnn.data import open_data

    own: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    how: dict[str, Any] = {"recipe": "digits", "schemes": ("lr",), "for_": "cpu", "device": device}
    with resumable():
        digits = open_data("digits", limit=limit)
        shape: dict[str, Any] = {"num_classes": len(digits.classes), "in_channels": 1}
        make = partial(lr.create_model, "nin", width=WIDTH, stride=STRIDE, norm="batch", **shape)
        found = lr.compare(make, digits, out=out, minutes=MINUTES, **how, **own)
    return print_json(found.to_dict()) if as_json else print_comparison(found)


@grouped
def design_command(
    model: Model,
    named: SourceOptions,
    macs: opt.Macs = None,
    engine: Annotated[str, option("torch, optimize, or an engine (onnx, openvino, ncnn, ...).")] = "torch",
    precision: Annotated[str | None, option("fp32, fp16 or bf16; in an engine fp32, fp16 or int8.")] = None,
    batch: opt.Batch = 1,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: Json = False,
) -> None:
    """Advise whether low-rank filters, fewer filters or both are faster.

    Every layer is measured as strips and as a thinner conv, then whole networks within the budget are. This is
    `lowrank compare` without images, and has more options.

    Examples:

      lowrank design vgg11-gmp --macs 0.4
      lowrank design nin --macs 0.5 --engine onnx --precision int8
    """
    from lowrank_cnn.core.clock import torch_threads

    with torch_threads(threads):
        _advise(model, named, batch, device, as_json, macs=macs, engine=engine, precision=precision)
    if not as_json:
        errors.print("This is `lowrank compare` without images: with --data, it trains the networks and compares.")


def _advise(
    model: str, named: SourceOptions, batch: int, device: str, as_json: bool, other: str = "--engine", **how: Any
) -> None:
    """Measure, and print the advice; `other` is the option that names another engine."""
    from lowrank_cnn.cli.source import placed

    source, size = named.find(model)
    _, network, example = placed(source.network, size, batch, device)
    advice = lr.design(network, example, **how)
    if as_json:
        return print_json({"model": source.name, "input": list(example.shape), **advice.to_dict()})
    layers, networks = advice.tables()
    print_table(f"{source.name}: layers", *layers)
    print_table("Networks within the budget", *networks)
    console.print(advice.verdict, soft_wrap=True)
    if advice.device == "cpu" and advice.engine == "torch":
        told = f"On a CPU, engines differ, since some have Winograd's algorithm: {other} names another."
        console.print(told, soft_wrap=True)
    return None
