"""Commands that use a trained network: evaluate, predict."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli import options as opt
from lowrank_cnn.cli.options import IMAGES, ImageOptions, Json, grouped, option
from lowrank_cnn.cli.show import console, errors, print_accuracy, print_json, print_problems, print_table
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.text import counted, first_few

if TYPE_CHECKING:
    from lowrank_cnn.train.evaluate import EvaluationDetails
    from lowrank_cnn.train.trained import Trained

_SHOWN_PAIRS = 5


@grouped
def evaluate_command(
    *,
    model: opt.TrainedModel,
    data: Annotated[str, option("Folder, .csv, shards, Hub name or digits.", panel=IMAGES)],
    best: Annotated[bool, option("Use the best weights of a run, not the last.", "--best")] = False,
    pretrained: opt.PackageWeights = None,
    into: opt.Into = None,
    device: opt.Device = "auto",
    workers: opt.Workers = 0,
    how: ImageOptions,
    class_names: opt.ClassNames = None,
    every_class: Annotated[bool, option("Print every class, and the worst images.", "--per-class")] = False,
    output: opt.Output = None,
    trusted: opt.Trusted = False,
    as_json: Json = False,
) -> None:
    """Measure accuracy on test images.

    Prints top-1 and top-5 accuracy, the classes confused most and the calibration. The folder needs no train/,
    and may have images of only some of the network's classes.

    Examples:

      lowrank evaluate runs/photos --data photos
      lowrank evaluate nin-c3-lr --pretrained cifar10 --data uoft-cs/cifar10
    """
    from lowrank_cnn.data import open_data
    from lowrank_cnn.data.sources import fewer, parse_image_size
    from lowrank_cnn.train.evaluate import changed_set, evaluate, held_out_images, match_classes

    if pretrained and best:
        raise LowRankError("--best is for runs: the package has one version of its own weights.")
    shared = {"bad": how.bad, "class_names": class_names, "progress": not as_json}
    reading = partial(open_data, data, only_test=True, limit=how.limit, **shared)
    images = reading(image_size=how.image_size)
    trained = _trained(model, pretrained, into, best=best, trusted=trusted)
    same_size = how.image_size is None or parse_image_size(how.image_size) == tuple(trained.image[1:])
    held_out = held_out_images(trained, data, **shared) if same_size else None
    if held_out:
        told = counted(len(held_out.test), "image")
        errors.print(f"The network was trained on {held_out.name}: these are the {told} held out of it.")
        images = replace(held_out, test=fewer(held_out.test, how.limit))
    else:
        if told := changed_set(trained, images):
            errors.print(told)
        alike = images.test.size == trained.image if trained.image else images.test.channels == trained.channels
        if same_size and not alike:
            match_classes(trained, images)
            images = reading(image_size=trained.size_option, channels=trained.channels)
    result = evaluate(trained, images, device=device, workers=workers, output=output, progress=not as_json)
    figures = result.to_dict()
    assert result.details is not None
    if as_json:
        shown = result.details.to_dict(pictures=False)
        return print_json({"model": model, "data": images.name, **figures, "details": shown})
    print_accuracy(f"On {images.name}", model, figures, len(images.classes), loss=f"{result.loss:.4f}")
    _print_details(result.details, every_class=every_class)
    return print_problems(images)


def predict_command(
    model: opt.TrainedModel,
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders of them.")],
    top: Annotated[int, option("How many classes to name for each image.")] = 3,
    pretrained: opt.PackageWeights = None,
    into: opt.Into = None,
    device: opt.Device = "auto",
    output: opt.Output = None,
    trusted: opt.Trusted = False,
    as_json: Json = False,
) -> None:
    """Classify image files.

    Prints the likeliest classes and their probabilities. If an image cannot be read, the others are still
    classified, and the exit code is 1.

    Examples:

      lowrank predict runs/photos holiday.jpg
      lowrank predict nin-c3-lr --pretrained cifar10 holiday.jpg --top 5
    """
    from lowrank_cnn.train.evaluate import each_image, predict

    trained = _trained(model, pretrained, into, trusted=trusted)
    files: list[Path] = list(each_image(images))
    answers = predict(trained, files, top=top, device=device, bad="skip", output=output)
    failed = [path for path, answer in zip(files, answers, strict=True) if answer is None]
    if failed and len(failed) == len(files):
        predict(trained, failed[:1], device=device)  # raises an error that names the problem
    if as_json:
        classes = [[{"class": name, "probability": p} for name, p in answer or ()] for answer in answers]
        print_json([{"image": str(path), "classes": found} for path, found in zip(files, classes, strict=True)])
    else:
        told = [", ".join(f"{name} {p:.1%}" for name, p in answer or ()) for answer in answers]
        unread = ["could not be read" if path.exists() else "there is no such file" for path in files]
        rows = [(path, words or why) for path, words, why in zip(files, told, unread, strict=True)]
        print_table("Predictions", ("image", "<classes"), rows)
    if failed:
        told = f"{len(failed)} of {counted(len(files), 'image')} could not be read"
        errors.print(f"{told}: {first_few([str(path) for path in failed])}")
        raise typer.Exit(1)


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
            (image.image, image.true, f"{exp(-image.loss):.2%}", image.predicted, f"{image.probability:.1%}")
            for image in details.worst[:_SHOWN_PAIRS]
        ]
        print_table("Most wrong", ("image", "<class", "probability", "<taken for", "probability"), wrong)
    error = details.calibration_error
    console.print(f"Confidence and accuracy differ by {error:.1%} on average (calibration).")


def _trained(
    model: str, pretrained: str | None, into: str | None, *, trusted: bool, best: bool = False
) -> Trained:
    """The trained network at a path or of the package; says if its training has not come to an end."""
    from lowrank_cnn.cli.source import find_into, is_path
    from lowrank_cnn.train.trained import how_far, load_checkpoint

    if pretrained and is_path(model):
        raise LowRankError(f"{model} has weights of its own: --pretrained is for networks by name.")
    if pretrained:
        return lr.load_pretrained(model, pretrained)
    if Path(model).name == model and not (is_path(model) or Path(model).with_suffix(".json").exists()):
        known = " or ".join(f"{name} --pretrained {data}" for name, data in lr.list_pretrained())
        raise LowRankError(f"{model} is no trained network: give a run's directory, an exported file, or {known}.")
    trained = load_checkpoint(model, best=best, network=find_into(into, model), trusted=trusted)
    if words := how_far(model, best=best):
        errors.print(f"These are the weights of {model} {words}, not those of a finished run.")
    return trained
