"""Commands that train and use a network: train, evaluate, predict."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.show import console, errors, print_json, print_table
from lowrank_cnn.cli.source import INTO_HELP, MODEL_HELP, find_model, is_path
from lowrank_cnn.convert import convert
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.errors import LowRankError, nearest
from lowrank_cnn.evaluation import Trained, evaluate, load_checkpoint, load_pretrained, predict
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.train import Interrupted, Recipe, Record, fit, get_recipe
from lowrank_cnn.train.randomness import seed_generators
from lowrank_cnn.train.recipes import RECIPES
from lowrank_cnn.train.settings import parse_settings
from lowrank_cnn.units import si

Source = Annotated[
    str, typer.Option("--data", help="digits, a folder of parquet shards or images, or a Hub repository.")
]
Bad = Annotated[Literal["skip", "refuse"], typer.Option(help="What to do with images that cannot be used.")]
Limit = Annotated[int | None, typer.Option(help="Use at most so many images of each split.")]
Size = Annotated[int | None, typer.Option(help="Bring every image to this square.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Into = Annotated[str | None, typer.Option(help=INTO_HELP)]
Weights = Annotated[
    str | None, typer.Option("--pretrained", help="Take the package's own weights of a network: cifar10.")
]
Workers = Annotated[int, typer.Option(help="Processes that decode images, where these are streamed.")]


def add_to(app: typer.Typer) -> None:
    app.command("train")(train_command)
    app.command("evaluate")(evaluate_command)
    app.command("predict")(predict_command)


def train_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Source,
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = "modern",
    scheme: Annotated[str | None, typer.Option(help="A scheme in place of the network's own.")] = None,
    width: Annotated[float | None, typer.Option(help="Scale the number of filters.")] = None,
    norm: Annotated[str | None, typer.Option(help="batch, or none; else as the recipe says.")] = None,
    stride: Annotated[int | None, typer.Option(help="Stride of the first conv.")] = None,
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
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars into --out.")] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    workers: Workers = 0,
    bad: Bad = "skip",
    limit: Limit = None,
    image_size: Size = None,
    as_json: Json = False,
) -> None:
    """Train a network from scratch, or go on with the weights of one; under torchrun, on all of its processes."""
    frequent = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "norm": norm, "precision": precision}
    resolved = _resolve(recipe, frequent, settings or [])
    images = open_data(data, bad=bad, limit=limit, image_size=image_size)
    if not as_json:
        _print_start(images, resolved)
    seed_generators(seed)
    network = _to_train(model, images, scheme, resolved, width=width, stride=stride)
    with _leaving_politely():
        record = fit(
            network,
            images,
            resolved,
            seed=seed,
            out=out,
            resume=resume,
            device=device,
            compile=compile_,
            workers=workers,
            progress=not as_json,
            tensorboard=tensorboard,
            checkpoint_every=checkpoint_every,
        )
    _print_result(record, out, as_json)


def evaluate_command(
    model: Annotated[str, typer.Argument(help="A run's directory, a checkpoint, or a network's name.")],
    data: Source,
    best: Annotated[bool, typer.Option("--best", help="The best weights of a run, not the last.")] = False,
    pretrained: Weights = None,
    into: Into = None,
    device: Device = "auto",
    workers: Workers = 0,
    bad: Bad = "skip",
    limit: Limit = None,
    image_size: Size = None,
    as_json: Json = False,
) -> None:
    """Measure top-1 and top-5 accuracy on the test images."""
    images = open_data(data, bad=bad, limit=limit, image_size=image_size)
    trained = load_pretrained(model, pretrained) if pretrained else _find(model, best, images, into)
    square = trained.square if isinstance(trained, Trained) else None
    if isinstance(trained, Trained) and image_size is None and square and images.test.size != trained.image:
        # Training brought its images to one square: do the same here.
        images = open_data(data, bad=bad, limit=limit, image_size=square, channels=trained.channels)
    result = evaluate(trained, images, device=device, workers=workers)
    if as_json:
        print_json({"model": model, "data": images.name, **result.to_dict()})
        return
    row = (model, f"{result.top1:.2%}", f"{result.top5:.2%}", f"{result.n:,}", f"{result.loss:.4f}")
    print_table(f"On {images.name}", ("network", "top-1", "top-5", "n", "loss"), [row])
    _print_problems(images)


def predict_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run's directory, a checkpoint, or a network's name.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(help="How many classes to name for each image.")] = 3,
    pretrained: Weights = None,
    into: Into = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what is on images, with the likeliest classes and their probabilities."""
    trained = load_checkpoint(checkpoint, network=_unconverted(into)) if into else checkpoint
    trained = load_pretrained(str(checkpoint), pretrained) if pretrained else trained
    answers = predict(trained, images, top=top, device=device)
    if as_json:
        print_json(
            [
                {"image": str(path), "classes": [{"class": name, "probability": p} for name, p in answer]}
                for path, answer in zip(images, answers, strict=True)
            ]
        )
        return
    rows = [
        (path, ", ".join(f"{name} {p:.1%}" for name, p in answer))
        for path, answer in zip(images, answers, strict=True)
    ]
    print_table("Predictions", ("image", "<classes"), rows)


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
        raise typer.Exit(130) from farewell


def _first_process() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _network(name: str, data: Data, **options: Any) -> torch.nn.Module:
    """A network for the classes and channels of the data."""
    given = {key: value for key, value in options.items() if value is not None}
    return create_model(name, num_classes=len(data.classes), in_channels=data.test.channels, **given)


def _to_train(text: str, data: Data, scheme: str | None, recipe: Recipe, **options: Any) -> torch.nn.Module:
    """One of our networks, fresh; or any other as it is, its convs rewritten where a scheme is given."""
    if not is_path(text):
        return _network(text, data, scheme=scheme, norm=recipe.norm, **options)
    network = find_model(text, **options).network.train()
    return convert(network, scheme) if scheme else network


def _unconverted(into: str | None) -> torch.nn.Module | None:
    return find_model(into).network if into else None


def _find(model: str, best: bool, images: Data, into: str | None) -> Trained | torch.nn.Module:
    """The trained network that a path stands for, or the untrained one of a name: what guessing gives."""
    if model in list_models() and not Path(model).exists():
        errors.print(f"{model} has fresh weights, so this is guessing; a run's directory has trained ones.")
        torch.manual_seed(0)
        return _network(model, images)
    if not Path(model).exists() and not Path(model).with_suffix(".json").exists():
        raise LowRankError(
            f"{model} is neither a checkpoint nor a network's name; {nearest(model, list_models())}"
        )
    return load_checkpoint(model, best=best, network=_unconverted(into))


def _print_start(data: Data, recipe: Recipe) -> None:
    if not _first_process():
        return
    fields = "  ".join(f"{field}={value}" for field, value in recipe.to_dict().items())
    console.print(f"Recipe: {fields}", markup=False)
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    console.print(f"Images: {data.name}, {counts}, {len(data.classes)} classes", markup=False)
    _print_problems(data)


def _print_problems(data: Data) -> None:
    for name, split in (("train", data.train), ("test", data.test)):
        if split.problems:
            console.print(f"Left out of {name}: {split.problems}", markup=False)


def _print_result(record: Record, out: Path | None, as_json: bool) -> None:
    r = record.result
    if not _first_process():
        return
    if as_json:
        print_json({"model": record.model["name"], "out": str(out) if out else None, **r})
        return
    columns = ("network", "top-1", "top-5", "n", "MACs", "params", "seconds", "images/s")
    row = (
        record.model["name"],
        f"{r['top1']:.2%}",
        f"{r['top5']:.2%}",
        f"{r['n']:,}",
        si(r["macs"]) if r["macs"] else "",
        si(r["params"]),
        f"{r['seconds']:.1f}",
        f"{r['images_per_second']:,.0f}",
    )
    print_table(f"Trained on {record.data['name']}", columns, [row])
    if out:
        console.print(f"The run is in {out}: try `lowrank evaluate {out} --data ...`", markup=False)
