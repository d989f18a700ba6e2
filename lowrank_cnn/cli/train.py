"""The command `lowrank train`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowrank_cnn.cli.config import Config, config_recipe
from lowrank_cnn.cli.options import (
    NETWORK,
    TRAINING,
    Bad,
    Channels,
    ClassNames,
    Compile,
    DataPath,
    Decode,
    Device,
    Hold,
    Into,
    Json,
    Limit,
    Model,
    Pretrained,
    Recompute,
    Settings,
    Size,
    Stride,
    TestPath,
    ValSplit,
    Width,
    Workers,
    grouped,
)
from lowrank_cnn.cli.show import console, first_process, print_json, print_problems, print_table
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import si

if TYPE_CHECKING:
    from lowrank_cnn.cli.learning import Training
    from lowrank_cnn.data import Data
    from lowrank_cnn.train import Recipe, Record


@dataclass(frozen=True)
class NetworkOptions:
    """How the network is built."""

    scheme: Annotated[
        str | None,
        typer.Option(help="A scheme for one of our networks; any other is converted.", rich_help_panel=NETWORK),
    ] = None
    macs: Annotated[
        float | None,
        typer.Option(help="Share of the MACs that --scheme 'learned(...)' keeps.", rich_help_panel=NETWORK),
    ] = None
    latency: Annotated[
        float | None,
        typer.Option(help="Share of the time that --scheme 'learned(...)' keeps.", rich_help_panel=NETWORK),
    ] = None
    shapes: Annotated[
        Path | None,
        typer.Option(help="A shapes.json of learned shapes, to train from scratch.", rich_help_panel=NETWORK),
    ] = None
    width: Width = None
    norm: Annotated[
        str | None, typer.Option(help="batch or none; by default as in the recipe.", rich_help_panel=NETWORK)
    ] = None
    stride: Stride = None
    pretrained: Pretrained = None
    into: Into = None

    def training(self) -> tuple[str | None, Training]:
        """The scheme that the network is built by, and the function that trains it."""
        from lowrank_cnn.cli.learning import training_of

        return training_of(self.scheme, self.shapes, macs=self.macs, latency=self.latency)

    def building(self, model: str, scheme: str | None, recipe: Recipe) -> dict[str, Any]:
        """The options that the network is built with.

        The recipe chooses norm and pool, except for trained weights and for networks that are not ours.
        """
        from lowrank_cnn.cli.source import is_path

        own = {"norm": self.norm} if self.pretrained or is_path(model) else recipe.network()
        return {**own, "scheme": scheme, "width": self.width, "stride": self.stride, "pretrained": self.pretrained}


@dataclass(frozen=True)
class RecipeOptions:
    """The recipe, and the fields of it that are set."""

    recipe: Annotated[
        str, typer.Option(help="A training recipe: `lowrank recipes` lists them.", rich_help_panel=TRAINING)
    ] = "modern"
    epochs: Annotated[int | None, typer.Option(help="Epochs to train at most.", rich_help_panel=TRAINING)] = None
    batch_size: Annotated[
        int | None, typer.Option(help="Images per step, over all processes.", rich_help_panel=TRAINING)
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate at the start.", rich_help_panel=TRAINING)] = None
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=TRAINING)] = (
        None
    )
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(help="Train with rounded layers, for an int8 export.", rich_help_panel=TRAINING),
    ] = None
    settings: Settings = None

    def resolve(self, file: dict[str, Any], norm: str | None) -> Recipe:
        """The recipe with the fields that --config, then the options, then --set change."""
        from lowrank_cnn.train import get_recipe
        from lowrank_cnn.train.settings import parse_settings

        own = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr, "precision": self.precision}
        own |= {"norm": norm, "quantize": self.quantize}
        given = {name: value for name, value in own.items() if value is not None}
        return get_recipe(self.recipe, **(file | given | parse_settings(self.settings or [])))


@dataclass(frozen=True)
class RunOptions:
    """Where and how the run is carried out."""

    seed: Annotated[
        int, typer.Option(help="Seed of weights, data order, and dropout.", rich_help_panel=TRAINING)
    ] = 0
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for checkpoints and the record.")] = (
        None
    )
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False
    device: Device = "auto"
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="Run directory of a network to distil from, as well as labels.", rich_help_panel=TRAINING
        ),
    ] = None
    compile_: Compile = None
    recompute: Recompute = False
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The same as --log tensorboard.")] = False
    log: Annotated[
        list[str] | None, typer.Option(help="Also log to tensorboard, csv, wandb, mlflow or trackio; repeatable.")
    ] = None
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0
    workers: Workers = 0
    decode: Decode = "cpu"
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Same bits in every run, on the CPU or one GPU; slower.",
            rich_help_panel=TRAINING,
        ),
    ] = False

    def check(self, precision: str) -> None:
        """Refuse a device that does not exist, a directory in use and an unknown logger."""
        from lowrank_cnn.train.directory import RunDirectory
        from lowrank_cnn.train.fabric import resolve_device, resolve_precision
        from lowrank_cnn.train.loggers import check_loggers

        resolve_precision(precision, resolve_device(self.device))
        check_loggers(self.log or ())
        if self.resume and self.out is None:
            raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
        if self.out is not None and not self.resume:
            RunDirectory(self.out).check_free()

    def for_fit(self) -> dict[str, Any]:
        """These options as `fit` takes them."""
        names = ("seed", "out", "resume", "device", "tensorboard", "checkpoint_every", "workers", "decode")
        same = {name: getattr(self, name) for name in (*names, "deterministic")}
        teacher = {} if self.teacher is None else {"teacher": self.teacher}
        how = {"compile": "auto" if self.compile_ is None else self.compile_, "log": self.log or ()}
        return {**same, **how, **teacher, "checkpoint_activations": self.recompute}


@dataclass(frozen=True)
class ImageOptions:
    """How images are read."""

    test: TestPath = None
    val_split: ValSplit = None
    class_names: ClassNames = None
    bad: Bad = "skip"
    limit: Limit = None
    hold: Hold = 2.0
    image_size: Size = None
    channels: Channels = None

    def reading(self, data: str, *, progress: bool) -> Callable[..., Data]:
        """A function that reads the images, with other options where those are given."""
        from lowrank_cnn.data import open_data

        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hold"}
        return partial(open_data, data, resident_bytes=int(self.hold * 2**30), progress=progress, **options)


@grouped
def train_command(
    context: typer.Context,
    model: Model,
    data: DataPath,
    network: NetworkOptions,
    training: RecipeOptions,
    run: RunOptions,
    images: ImageOptions,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Train a network, from scratch or from trained weights.

    A run can be killed at any time and resumed. Under torchrun, all its processes train together.

    Examples:

      lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first
      lowrank train vgg11-gmp-lr --data photos --image-size 64 --out runs/photos
      lowrank train torchvision:resnet18 --pretrained default --scheme lr-join --data photos --out runs/resnet
      lowrank train nin-c3-lr --data photos --out runs/photos --resume
      lowrank train vgg11-gmp --data photos --scheme "learned(kx1, 1xk, 1x1, kxk)" --macs 0.4 --out runs/shapes
      lowrank train vgg11-gmp --data photos --shapes runs/shapes/shapes.json --out runs/again
      lowrank train runs/photos --data photos --quantize int8 --lr 0.001 --epochs 5 --out runs/int8
    """
    from lowrank_cnn.cli.source import build_for, check_model, is_weights
    from lowrank_cnn.train.determinism import seed_generators
    from lowrank_cnn.train.failure import may_end_process
    from lowrank_cnn.train.opening import as_network_wants

    recipe = training.resolve(config_recipe(context), network.norm)
    scheme, train = network.training()
    building, reading = network.building(model, scheme, recipe), images.reading(data, progress=not as_json)
    seed_generators(run.seed)
    check_model(model, **building)  # before the images are read, which may take long
    run.check(recipe.precision)
    found = reading()
    seed_generators(run.seed)
    source = build_for(found, model, into=network.into, **building)
    wish = {"input_size": source.input_size, "sized": images.image_size is not None, "tuned": is_weights(model)}
    wanted = as_network_wants(found, source.network, recipe, reading, **wish)
    if not as_json:
        _print_start(wanted, recipe, run.out, source.remark, tuned=wanted is not found and is_weights(model))
    with may_end_process():
        record = train(source.network.train(), wanted, recipe, progress=not as_json, **run.for_fit())
    _print_result(record, run.out, as_json)
    if run.out and not as_json and first_process():
        hint = _next_command(record, run.out, data, network.into or model, images.class_names)
        console.print(f"The run is in {run.out}: try `{hint}`", markup=False, soft_wrap=True)


def _next_command(record: Record, out: Path, data: str, source: str, names: Path | None) -> str:
    """The command that evaluates the run. A run holds no code, so --into names a network that is not ours."""
    from lowrank_cnn.models.rebuild import entry_description

    ours = entry_description(record.model)["model"] is not None
    into, named = [] if ours else ["--into", source], ["--class-names", str(names)] if names else []
    return shlex.join(["lowrank", "evaluate", str(out), "--data", data, *into, *named])


def _told(recipe: Recipe) -> str:
    """The name, the usual settings, and every field that has not the default of all recipes."""
    from lowrank_cnn.train.recipe import Recipe
    from lowrank_cnn.train.schedule import warmup_epochs

    values, defaults = recipe.to_dict() | {"warmup": warmup_epochs(recipe)}, Recipe().to_dict()
    shown = {"batch_size", "epochs", "lr", "optimizer", "schedule"}
    told = [f"{field}={value}" for field, value in values.items() if field in shown or value != defaults[field]]
    return "  ".join([recipe.name, *(text for text in told if not text.startswith("name="))])


def _print_start(data: Data, recipe: Recipe, out: Path | None, remark: str, *, tuned: bool) -> None:
    if not first_process():
        return
    console.print(f"Recipe: {_told(recipe)} (the record has every field)", markup=False)
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    size = f"{data.train.size[1]}x{data.train.size[2]} pixels" if data.train.size else "of many sizes"
    console.print(f"Images: {data.name}, {counts}, {len(data.classes)} classes, {size}", markup=False)
    if held := data.details.get("val_split"):
        console.print(f"There are no test images: {held['share']:.0%} of each class are held out (--val-split).")
    if data.train.size and max(data.train.size[1:]) > 512:
        console.print("Images of this size train slowly: --image-size 224 brings them to 224x224.")
    if data.details.get("sized_by"):
        console.print("Images are resized to the size that the network is for; --image-size sets another.")
    if tuned and data.train.size:
        console.print("Images are as large as those that the network was trained on; --image-size sets another.")
    if remark:
        console.print(remark, markup=False)
    print_problems(data)
    if out is None:
        console.print("This run is not saved: give --out to keep checkpoints and the record.", markup=False)


def _print_result(record: Record, out: Path | None, as_json: bool) -> None:
    from lowrank_cnn.train.score import TOP_FIVE

    r = record.result
    if not first_process():
        return
    if as_json:
        print_json({"model": record.model["name"], "out": str(out) if out else None, **r})
        return
    top5 = {"top-5": f"{r['top5']:.2%}"} if len(record.data["classes"]) > TOP_FIVE else {}
    row = {"network": record.model["name"], "top-1": f"{r['top1']:.2%}", **top5, "n": f"{r['n']:,}"}
    row |= {"MACs": si(r["macs"]) if r["macs"] else "", "params": si(r["params"])}
    row |= {"seconds": f"{r['seconds']:.1f}", "images/s": f"{r['images_per_second']:,.0f}"}
    print_table(f"Trained on {record.data['name']}", tuple(row), [tuple(row.values())])
