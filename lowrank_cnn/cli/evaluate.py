"""Commands that use a trained network: evaluate, predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowrank_cnn.cli.options import (
    Bad,
    ClassNames,
    DataPath,
    Device,
    Into,
    Json,
    Limit,
    Output,
    PackageWeights,
    Size,
    TrainedModel,
    Trusted,
    Workers,
    option,
)
from lowrank_cnn.cli.show import console, errors, print_json, print_problems, print_table
from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.text import counted

if TYPE_CHECKING:
    import torch

    from lowrank_cnn.data import Data
    from lowrank_cnn.train.evaluate import Evaluation, EvaluationDetails, Ranking
    from lowrank_cnn.train.trained import Trained

_SHOWN_PAIRS = 5


def evaluate_command(
    model: TrainedModel,
    data: DataPath,
    best: Annotated[bool, option("Use the best weights of a run, not the last.", "--best")] = False,
    pretrained: PackageWeights = None,
    into: Into = None,
    device: Device = "auto",
    workers: Workers = 0,
    bad: Bad = "skip",
    limit: Limit = None,
    image_size: Size = None,
    class_names: ClassNames = None,
    every_class: Annotated[bool, option("Print every class, and the worst images.", "--per-class")] = False,
    output: Output = None,
    trusted: Trusted = False,
    as_json: Json = False,
) -> None:
    """Measure accuracy on test images.

    Prints top-1 and top-5 accuracy, the classes confused most and the calibration. The folder needs no train/,
    and may have images of only some of the network's classes.

    Examples:

      lowrank evaluate runs/photos --data photos
      lowrank evaluate nin-c3-lr --pretrained cifar10 --data uoft-cs/cifar10 --per-class
    """
    from lowrank_cnn.cli.source import is_path
    from lowrank_cnn.data import open_data
    from lowrank_cnn.data.sources import parse_image_size
    from lowrank_cnn.train.evaluate import changed_set, evaluate, held_out_images
    from lowrank_cnn.train.trained import Trained, load_pretrained

    if pretrained and best:
        raise LowRankError("--best is for runs: the package has one version of its own weights.")
    if pretrained and is_path(model):
        raise LowRankError(f"{model} has weights of its own: --pretrained is for networks by name.")
    shared = {"bad": bad, "class_names": class_names, "progress": not as_json}
    reading = partial(open_data, data, only_test=True, limit=limit, **shared)
    images = reading(image_size=image_size)
    trained = load_pretrained(model, pretrained) if pretrained else _find(model, best, images, into, trusted)
    if isinstance(trained, Trained):
        fits = image_size is None or parse_image_size(image_size) == tuple(trained.image[1:])
        again = held_out_images(trained, data, **shared) if fits else None
        if again is None and (told := changed_set(trained, images)):
            errors.print(told)
        images = _told_held_out(again, limit) if again else _as_in_training(trained, images, image_size, reading)
    result = evaluate(trained, images, device=device, workers=workers, output=output, progress=not as_json)
    assert result.details is not None
    if as_json:
        shown = result.details.to_dict(pictures=False)
        print_json({"model": model, "data": images.name, **result.to_dict(), "details": shown})
        return
    _print_accuracy(model, images, result)
    _print_details(result.details, every_class=every_class)
    print_problems(images)


def predict_command(
    model: TrainedModel,
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders of them.")],
    top: Annotated[int, option("How many classes to name for each image.")] = 3,
    pretrained: PackageWeights = None,
    into: Into = None,
    device: Device = "auto",
    output: Output = None,
    trusted: Trusted = False,
    as_json: Json = False,
) -> None:
    """Classify image files.

    Prints the likeliest classes and their probabilities. If an image cannot be read, the others are still
    classified, and the exit code is 1.

    Examples:

      lowrank predict runs/photos holiday.jpg
      lowrank predict nin-c3-lr --pretrained cifar10 holiday.jpg --top 5
    """
    from lowrank_cnn.cli.source import find_into, is_ours
    from lowrank_cnn.train.evaluate import files_below, predict
    from lowrank_cnn.train.trained import load_checkpoint, load_pretrained

    if is_ours(model) and not pretrained:
        raise LowRankError(_guessing(model))
    trained = load_pretrained(model, pretrained) if pretrained else model
    if (into or trusted) and not pretrained:
        trained = load_checkpoint(model, network=find_into(into, model), trusted=trusted)
    files = [path for image in images for path in (files_below(image) if image.is_dir() else [image])]
    answers = predict(trained, files, top=top, device=device, bad="skip", output=output)
    failed = [path for path, answer in zip(files, answers, strict=True) if answer is None]
    if failed and len(failed) == len(files):
        predict(trained, failed[:1], device=device)  # raises an error that names the problem
    if not pretrained:
        _tell_how_far(model)
    _print_answers(files, answers, as_json)
    if failed:
        names = ", ".join(map(str, failed[:3])) + (", ..." if len(failed) > 3 else "")
        errors.print(f"{len(failed)} of {counted(len(files), 'image')} could not be read: {names}")
        raise typer.Exit(1)


def _unread(path: Path) -> str:
    return "could not be read" if path.exists() else "there is no such file"


def _print_answers(files: list[Path], answers: Sequence[Ranking | None], as_json: bool) -> None:
    pairs = list(zip(files, answers, strict=True))
    if as_json:
        print_json(
            [
                {"image": str(path), "classes": [{"class": name, "probability": p} for name, p in answer or ()]}
                for path, answer in pairs
            ]
        )
        return
    rows = [
        (path, ", ".join(f"{name} {p:.1%}" for name, p in answer) if answer else _unread(path))
        for path, answer in pairs
    ]
    print_table("Predictions", ("image", "<classes"), rows)


def _print_accuracy(model: str, images: Data, result: Evaluation) -> None:
    from lowrank_cnn.train.evaluate import TOP_FIVE

    top5 = {"top-5": f"{result.top5:.2%}"} if len(images.classes) > TOP_FIVE else {}
    row = {"network": model, "top-1": f"{result.top1:.2%}", **top5}
    row |= {"n": f"{result.n:,}", "loss": f"{result.loss:.4f}"}
    print_table(f"On {images.name}", list(row), [list(row.values())])


def _print_details(details: EvaluationDetails, *, every_class: bool) -> None:
    """Print the pairs confused most and the calibration; with `every_class`, also classes and worst images."""
    if every_class:
        known = sorted((row for row in details.per_class() if row["n"]), key=lambda row: row["accuracy"])
        rows = [(row["class"], f"{row['accuracy']:.1%}", f"{row['n']:,}") for row in known]
        print_table("Each class, the worst first", ("class", "accuracy", "n"), rows)
    pairs = [
        (row["true"], row["predicted"], f"{row['n']:,}", f"{row['share']:.1%}")
        for row in details.most_confused(_SHOWN_PAIRS)
    ]
    if pairs:
        print_table("Most confused", ("class", "<taken for", "images", "of the class"), pairs)
    if every_class and details.worst:
        wrong = [
            (image.image, image.true, image.predicted, f"{image.probability:.1%}")
            for image in details.worst[:_SHOWN_PAIRS]
        ]
        print_table("Most wrong", ("image", "<class", "<taken for", "probability"), wrong)
    error = details.calibration_error
    console.print(f"Confidence and accuracy differ by {error:.1%} on average (calibration).")


def _find(model: str, best: bool, images: Data, into: str | None, trusted: bool) -> Trained | torch.nn.Module:
    """The trained network at a path, or an untrained one by name, whose accuracy is that of guessing."""
    import torch

    from lowrank_cnn.cli.source import build_for, find_into, is_ours
    from lowrank_cnn.models import list_models
    from lowrank_cnn.models.hub import is_hub_name
    from lowrank_cnn.train.trained import load_checkpoint

    if is_ours(model):
        errors.print(_guessing(model))
        torch.manual_seed(0)
        return build_for(images, model).network
    if not (is_hub_name(model) or Path(model).exists() or Path(model).with_suffix(".json").exists()):
        if Path(model).suffix or Path(model).name != model:
            raise LowRankError(f"{model} does not exist.")
        raise LowRankError(
            f"{model} is neither a checkpoint nor a network's name; {nearest(model, list_models())}"
        )
    trained = load_checkpoint(model, best=best, network=find_into(into, model), trusted=trusted)
    _tell_how_far(model, best=best)
    return trained


def _tell_how_far(model: str, *, best: bool = False) -> None:
    """Warn if the weights are those of an unfinished run."""
    from lowrank_cnn.train.trained import how_far

    if words := how_far(model, best=best):
        line = f"These are the weights of {model} {words}, not those of a finished run."
        errors.print(line)


def _guessing(name: str) -> str:
    """The sentence for a network by name alone: it is untrained, and these are places of trained weights."""
    from lowrank_cnn.models import list_pretrained

    places = ["a run's directory", *(f"--pretrained {data}" for known, data in list_pretrained() if known == name)]
    return f"{name} by name has fresh weights, which can only guess: for trained ones give {' or '.join(places)}."


def _told_held_out(images: Data, limit: int | None) -> Data:
    """The images that training held out; a printed line tells the user that these are used."""
    from lowrank_cnn.data.sources import fewer

    held_out = counted(len(images.test), "image")
    line = f"The network was trained on {images.name}: these are the {held_out} held out of it."
    errors.print(line)
    return replace(images, test=fewer(images.test, limit))


def _as_in_training(trained: Trained, images: Data, asked: str | None, reopen: Callable[..., Data]) -> Data:
    """Bring test images to the size and the channels that training used."""
    from lowrank_cnn.data.sources import parse_image_size
    from lowrank_cnn.train.evaluate import match_classes

    fits = images.test.size == trained.image if trained.image else images.test.channels == trained.channels
    if fits or (asked is not None and parse_image_size(asked) != tuple(trained.image[1:])):
        return images
    match_classes(trained, images)
    try:
        return reopen(image_size=trained.size_option or asked, channels=trained.channels)
    except LowRankError as error:
        size = "x".join(map(str, trained.image or trained.input_size))
        raise LowRankError(
            f"the network was trained on images of {size}, and others are not brought to that: {error}"
        ) from error
