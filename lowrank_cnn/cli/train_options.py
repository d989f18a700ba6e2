"""The options of `lowrank train`, in groups, and what each group stands for in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowrank_cnn.cli.options import (
    NETWORK,
    TRAINING,
    Bad,
    Channels,
    ClassNames,
    Compile,
    Decode,
    Device,
    Hold,
    Into,
    Limit,
    Pretrained,
    Recompute,
    Settings,
    Size,
    Stride,
    TestPath,
    ValSplit,
    Width,
    Workers,
)
from lowrank_cnn.system.errors import LowRankError

if TYPE_CHECKING:
    from lowrank_cnn.cli.learning import Training
    from lowrank_cnn.data import Data
    from lowrank_cnn.train import Recipe

_MOST_GB = 2**30
"""Without end (--hold-gb inf), in a number that bytes can be counted by."""


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
        settings = parse_settings(self.settings or [])
        if "name" in settings:
            raise LowRankError(f"a recipe is chosen by its name with --recipe {settings['name']}, not with --set.")
        return get_recipe(self.recipe, **(file | given | settings))


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
    checkpoint_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0
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

    def check(self, precision: str, data: str) -> None:
        """Refuse a device that does not exist, a directory in use or of the images, and an unknown logger."""
        from lowrank_cnn.train.directory import RunDirectory
        from lowrank_cnn.train.fabric import resolve_device, resolve_precision
        from lowrank_cnn.train.loggers import check_loggers

        resolve_precision(precision, resolve_device(self.device))
        check_loggers(self.log or ())
        if self.resume and self.out is None:
            raise LowRankError("there is nothing to resume without the directory of a run: give --out.")
        if self.out is not None and not self.resume:
            RunDirectory(self.out).check_apart_from(data)
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
        held = int(min(self.hold, _MOST_GB) * 2**30)
        return partial(open_data, data, resident_bytes=held, progress=progress, **options)
