"""Commands that use a trained network: evaluate, predict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.options import Bad, Device, Into, Limit, Size, Source, Workers
from lowrank_cnn.cli.show import errors, print_json, print_problems, print_table
from lowrank_cnn.cli.source import build_for, find_model, is_ours, is_path
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.models import list_models, list_pretrained
from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.train.evaluation import check_classes, evaluate, how_far, predict
from lowrank_cnn.train.score import FIRST
from lowrank_cnn.train.trained import Trained, load_checkpoint, load_pretrained

TRAINED_HELP = "A run's directory, a checkpoint, an exported .safetensors, or a network's name."
Weights = Annotated[
    str | None, typer.Option("--pretrained", help="Take the package's own weights of a network: cifar10.")
]


def add_to(app: typer.Typer) -> None:
    app.command("evaluate")(evaluate_command)
    app.command("predict")(predict_command)


def evaluate_command(
    model: Annotated[str, typer.Argument(help=TRAINED_HELP)],
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
    if pretrained and best:
        raise LowRankError("--best is for runs; of the package's own weights there is one version.")
    if pretrained and is_path(model):
        raise LowRankError(f"{model} has weights of its own: --pretrained is for networks by name.")
    images = open_data(data, bad=bad, limit=limit, image_size=image_size)
    trained = load_pretrained(model, pretrained) if pretrained else _find(model, best, images, into)
    if isinstance(trained, Trained):
        images = _as_in_training(trained, images, image_size, partial(open_data, data, bad=bad, limit=limit))
    result = evaluate(trained, images, device=device, workers=workers)
    if as_json:
        print_json({"model": model, "data": images.name, **result.to_dict()})
        return
    top5 = {"top-5": f"{result.top5:.2%}"} if len(images.classes) > FIRST else {}
    row = {"network": model, "top-1": f"{result.top1:.2%}", **top5}
    row |= {"n": f"{result.n:,}", "loss": f"{result.loss:.4f}"}
    print_table(f"On {images.name}", list(row), [list(row.values())])
    print_problems(images)


def predict_command(
    model: Annotated[str, typer.Argument(help=TRAINED_HELP)],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(help="How many classes to name for each image.")] = 3,
    pretrained: Weights = None,
    into: Into = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what is on images, with the likeliest classes and their probabilities."""
    if is_ours(model) and not pretrained:
        raise LowRankError(_guessing(model))
    trained = load_pretrained(model, pretrained) if pretrained else model
    trained = load_checkpoint(model, network=find_model(into).network) if into and not pretrained else trained
    answers = predict(trained, images, top=top, device=device)
    if not pretrained:
        _tell_how_far(model)
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


def _find(model: str, best: bool, images: Data, into: str | None) -> Trained | torch.nn.Module:
    """The trained network that a path stands for, or the untrained one of a name: what guessing gives."""
    if is_ours(model):
        errors.print(_guessing(model), markup=False, soft_wrap=True)
        torch.manual_seed(0)
        return build_for(images, model)
    if not Path(model).exists() and not Path(model).with_suffix(".json").exists():
        if Path(model).suffix or Path(model).name != model:
            raise LowRankError(f"{model} does not exist.")
        raise LowRankError(
            f"{model} is neither a checkpoint nor a network's name; {nearest(model, list_models())}"
        )
    trained = load_checkpoint(model, best=best, network=find_model(into).network if into else None)
    _tell_how_far(model, best=best)
    return trained


def _tell_how_far(model: str, *, best: bool = False) -> None:
    """Weights of a run that did not come to its end look like any others: say what they are."""
    if words := how_far(model, best=best):
        line = f"These are the weights of {model} {words}, not those of a finished run."
        errors.print(line, markup=False, soft_wrap=True)


def _guessing(name: str) -> str:
    """What is wrong with a network of ours by its name alone, and where trained weights are."""
    places = ["a run's directory", *(f"--pretrained {data}" for known, data in list_pretrained() if known == name)]
    return f"{name} by name has fresh weights, which can only guess: for trained ones give {' or '.join(places)}."


def _as_in_training(trained: Trained, images: Data, asked: int | None, reopen: Callable[..., Data]) -> Data:
    """Training brought its images to one square, and to grey or colour: the same is done here."""
    fits = images.test.size == trained.image if trained.image else images.test.channels == trained.channels
    if fits or (trained.image and not trained.square) or asked not in (None, trained.square):
        return images
    check_classes(trained, images)
    try:
        return reopen(image_size=trained.square or asked, channels=trained.channels)
    except LowRankError as error:
        size = "x".join(map(str, trained.image or trained.input_size))
        raise LowRankError(
            f"the network was trained on images of {size}, and others are not brought to that: {error}"
        ) from error
