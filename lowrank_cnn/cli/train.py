"""The command `lowrank train`."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lowrank_cnn.cli.config import Config, config_recipe
from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.options import (
    Bad,
    Channels,
    ClassNames,
    DataPath,
    Decode,
    Device,
    Into,
    Limit,
    Model,
    Pretrained,
    Size,
    TestPath,
    ValSplit,
    Workers,
)
from lowrank_cnn.cli.show import console, errors, print_json, print_problems, print_table
from lowrank_cnn.cli.source import build_for, check_model, is_path
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.models.rebuild import entry_description
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import si
from lowrank_cnn.train import Interrupted, Recipe, Record, fit, get_recipe
from lowrank_cnn.train.determinism import seed_generators
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.fabric import resolve_device, resolve_precision
from lowrank_cnn.train.opening import as_network_wants
from lowrank_cnn.train.recipes import RECIPES
from lowrank_cnn.train.score import TOP_FIVE
from lowrank_cnn.train.settings import parse_settings


def add_to(app: typer.Typer) -> None:
    app.command("train")(train_command)


def train_command(
    context: typer.Context,
    model: Model,
    data: DataPath,
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = "modern",
    scheme: Annotated[
        str | None, typer.Option(help="A scheme for one of our networks; any other is converted.")
    ] = None,
    width: Annotated[float | None, typer.Option(help="Scale the number of filters.")] = None,
    norm: Annotated[str | None, typer.Option(help="batch, or none; else as the recipe says.")] = None,
    stride: Annotated[int | None, typer.Option(help="Stride of the first conv.")] = None,
    pretrained: Pretrained = None,
    into: Into = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs to train at most.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate at the start.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of the recipe, as field=value; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order, and dropout.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Directory of the run: checkpoints and record.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    device: Device = "auto",
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    compile_: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Train through torch.compile; else where it is faster."),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Compute maps twice instead of keeping them.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars into --out.")] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    workers: Workers = 0,
    decode: Decode = "cpu",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in every run, on the CPU or one GPU; slower.")
    ] = False,
    test: TestPath = None,
    val_split: ValSplit = None,
    class_names: ClassNames = None,
    bad: Bad = "skip",
    limit: Limit = None,
    image_size: Size = None,
    channels: Channels = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Train a network from scratch, or go on with the weights of one; under torchrun, on all of its processes.

    Example: lowrank train nin-c3-lr --data photos --image-size 64 --out runs/photos
    """
    frequent = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "norm": norm, "precision": precision}
    resolved = _resolve(recipe, config_recipe(context), frequent, settings or [])
    options = {"scheme": scheme, "width": width, "stride": stride, "pretrained": pretrained}
    # Trained weights, and networks that are not ours, know their norm and pool; else the recipe says them.
    own = {"norm": norm, **options} if pretrained or is_path(model) else {**resolved.network(), **options}
    reading = partial(
        open_data,
        data,
        bad=bad,
        limit=limit,
        image_size=image_size,
        channels=channels,
        test=test,
        val_split=val_split,
        class_names=class_names,
        progress=not as_json,
    )
    seed_generators(seed)
    check_model(model, **own)  # all that can be wrong is checked before the images are read, which may be many
    _check_place(out, resume, device, resolved.precision)
    images = reading()
    seed_generators(seed)
    source = build_for(images, model, into=into, **own)
    wish = {"input_size": source.input_size, "sized": image_size is not None}
    images = as_network_wants(images, source.network, resolved, reading, **wish)
    if not as_json:
        _print_start(images, resolved, out, source.remark)
    with _leaving_politely():
        record = fit(
            source.network.train(),
            images,
            resolved,
            seed=seed,
            out=out,
            resume=resume,
            device=device,
            compile="auto" if compile_ is None else compile_,
            checkpoint_activations=recompute,
            workers=workers,
            decode=decode,
            deterministic=deterministic,
            progress=not as_json,
            tensorboard=tensorboard,
            checkpoint_every=checkpoint_every,
        )
    _print_result(record, out, as_json)
    if out and not as_json and _first_process():
        hint = _next_command(record, out, data, into or model)
        console.print(f"The run is in {out}: try `{hint}`", markup=False, soft_wrap=True)


def _resolve(name: str, file: dict[str, Any], frequent: dict[str, Any], settings: list[str]) -> Recipe:
    """The recipe with what the file of --config and then the options say; --set has the last word."""
    resolved = get_recipe(name, **(file | _given(frequent) | parse_settings(settings)))
    if resolved.epochs < 1:
        raise LowRankError("0 epochs train nothing: `lowrank evaluate` measures a network as it is.")
    return resolved


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_place(out: Path | None, resume: bool, device: str, precision: str) -> None:
    """Refuse a device that is not there and a directory in use."""
    resolve_precision(precision, resolve_device(device))
    if resume and out is None:
        raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
    if out is not None and not resume:
        RunDirectory(out).check_free()


@contextlib.contextmanager
def _leaving_politely() -> Iterator[None]:
    """Answer Ctrl-C as a shell expects, once the run has saved its state."""
    try:
        yield
    except Interrupted as farewell:
        errors.print(str(farewell), markup=False, soft_wrap=True)
        raise typer.Exit(farewell.exit_code) from farewell


def _first_process() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _next_command(record: Record, out: Path, data: str, source: str) -> str:
    """How to evaluate the run; it holds no code, so that a network that is not ours is named again."""
    ours = entry_description(record.model)["model"] is not None
    return shlex.join(["lowrank", "evaluate", str(out), "--data", data, *([] if ours else ["--into", source])])


def _print_start(data: Data, recipe: Recipe, out: Path | None, remark: str) -> None:
    if not _first_process():
        return
    fields = "  ".join(f"{field}={value}" for field, value in recipe.to_dict().items())
    console.print(f"Recipe: {fields}", markup=False)
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    size = f"{data.train.size[1]}x{data.train.size[2]} pixels" if data.train.size else "of many sizes"
    console.print(f"Images: {data.name}, {counts}, {len(data.classes)} classes, {size}", markup=False)
    if held := data.details.get("val_split"):
        console.print(f"There are no test images: {held['share']:.0%} of each class are held back (--val-split).")
    if data.details.get("sized_by"):
        console.print("Images are brought to the size that the network is for; --image-size sets another.")
    if remark:
        console.print(remark, markup=False)
    print_problems(data)
    if out is None:
        console.print("Nothing is kept of this run: --out gives it a directory.", markup=False)


def _print_result(record: Record, out: Path | None, as_json: bool) -> None:
    r = record.result
    if not _first_process():
        return
    if as_json:
        print_json({"model": record.model["name"], "out": str(out) if out else None, **r})
        return
    top5 = {"top-5": f"{r['top5']:.2%}"} if len(record.data["classes"]) > TOP_FIVE else {}
    row = {"network": record.model["name"], "top-1": f"{r['top1']:.2%}", **top5, "n": f"{r['n']:,}"}
    row |= {"MACs": si(r["macs"]) if r["macs"] else "", "params": si(r["params"])}
    row |= {"seconds": f"{r['seconds']:.1f}", "images/s": f"{r['images_per_second']:,.0f}"}
    print_table(f"Trained on {record.data['name']}", tuple(row), [tuple(row.values())])
