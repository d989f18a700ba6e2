"""The command `lowrank train`."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.options import Bad, Decode, Device, Into, Limit, Model, Pretrained, Size, Source, Workers
from lowrank_cnn.cli.show import console, errors, print_json, print_problems, print_table
from lowrank_cnn.cli.source import build_for, find_model, is_path
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.models.rebuild import entry_description
from lowrank_cnn.system.text import si
from lowrank_cnn.train import Interrupted, Recipe, Record, fit, get_recipe
from lowrank_cnn.train.randomness import seed_generators
from lowrank_cnn.train.recipes import RECIPES
from lowrank_cnn.train.score import FIRST
from lowrank_cnn.train.settings import parse_settings


def add_to(app: typer.Typer) -> None:
    app.command("train")(train_command)


def train_command(
    model: Model,
    data: Source,
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
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
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
    bad: Bad = "skip",
    limit: Limit = None,
    image_size: Size = None,
    as_json: Json = False,
) -> None:
    """Train a network from scratch, or go on with the weights of one; under torchrun, on all of its processes."""
    frequent = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "norm": norm, "precision": precision}
    resolved = _resolve(recipe, frequent, settings or [])
    options = {"scheme": scheme, "width": width, "stride": stride, "pretrained": pretrained}
    given = {"norm": norm, **options}
    own = given if pretrained else {**resolved.network(), **options}  # trained weights know what they are for
    seed_generators(seed)
    found = _checked(model, into, own, given)  # before the images, which may be many
    images = open_data(data, bad=bad, limit=limit, image_size=image_size)
    if not as_json:
        _print_start(images, resolved, out)
    seed_generators(seed)
    network = build_for(images, model, **own) if found is None else found
    with _leaving_politely():
        record = fit(
            network,
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


def _resolve(name: str, frequent: dict[str, Any], settings: list[str]) -> Recipe:
    """The recipe with what the options say; --set has the last word."""
    given = {field: value for field, value in frequent.items() if value is not None}
    return get_recipe(name, **(given | parse_settings(settings)))


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


def _checked(text: str, into: str | None, own: dict[str, Any], options: dict[str, Any]) -> nn.Module | None:
    """A network that is not ours, converted where a scheme is given; of ours the name and options are checked."""
    if is_path(text):
        return find_model(text, into=into, **options).network.train()
    with torch.device("cpu" if own.get("pretrained") else "meta"):
        find_model(text, **own)
    return None


def _next_command(record: Record, out: Path, data: str, source: str) -> str:
    """How to evaluate the run; it holds no code, so that a network that is not ours is named again."""
    ours = entry_description(record.model)["model"] is not None
    return shlex.join(["lowrank", "evaluate", str(out), "--data", data, *([] if ours else ["--into", source])])


def _print_start(data: Data, recipe: Recipe, out: Path | None) -> None:
    if not _first_process():
        return
    fields = "  ".join(f"{field}={value}" for field, value in recipe.to_dict().items())
    console.print(f"Recipe: {fields}", markup=False)
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    console.print(f"Images: {data.name}, {counts}, {len(data.classes)} classes", markup=False)
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
    top5 = {"top-5": f"{r['top5']:.2%}"} if len(record.data["classes"]) > FIRST else {}
    row = {"network": record.model["name"], "top-1": f"{r['top1']:.2%}", **top5, "n": f"{r['n']:,}"}
    row |= {"MACs": si(r["macs"]) if r["macs"] else "", "params": si(r["params"])}
    row |= {"seconds": f"{r['seconds']:.1f}", "images/s": f"{r['images_per_second']:,.0f}"}
    print_table(f"Trained on {record.data['name']}", tuple(row), [tuple(row.values())])
