"""The command `lowrank data`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowrank_cnn.cli.options import (
    IMAGES,
    ClassNames,
    Json,
    Limit,
    Missing,
    Overwrite,
    Size,
    option,
)
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.text import counted

if TYPE_CHECKING:
    from lowrank_cnn.data.inspect import DataSummary

_SHOWN, _MOST_CLASSES, _UNEVEN = 10, 40, 3
"""Names of a list, rows of the table of classes, and the ratio of class sizes that is worth a sentence."""


def data_command(
    images: Annotated[str, typer.Argument(help="Folder, .csv, shards, Hub name or digits.", metavar="IMAGES")],
    test: Annotated[str | None, option("Other images to test on.", panel=IMAGES)] = None,
    val_split: Annotated[float | None, option("Share to test on if there is no test set.", panel=IMAGES)] = None,
    class_names: ClassNames = None,
    image_size: Size = None,
    limit: Limit = None,
    missing: Missing = "refuse",
    sheet: Annotated[Path | None, option("Draw a few images of each class: sheet.png.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Check a data set: counts, sizes, classes, duplicates, unreadable images.

    Every image is decoded once. Duplicates are images with equal pixels; those that are both trained and tested on
    come first.

    Examples:

      lowrank data photos
      lowrank data photos --sheet photos.png
    """
    from lowrank_cnn.data.inspect import check_sheet, inspect_data, write_contact_sheet

    if sheet is not None:
        check_sheet(sheet, overwrite=overwrite)
    options = {"test": test, "val_split": val_split, "class_names": class_names, "image_size": image_size}
    found = inspect_data(images, **options, limit=limit, missing=missing, progress=not as_json)
    if sheet is not None:
        write_contact_sheet(found.data, sheet, overwrite=overwrite)
    if as_json:
        return print_json(found.to_dict() | {"training": _training(found), "sheet": sheet and str(sheet)})
    _print_splits(found)
    _print_classes(found)
    _print_duplicates(found)
    for name, split in found.splits.items():
        for kind, count in split.problems.counts.items():
            _print_list(f"{name}: {counted(count, kind)}", [w for k, w in split.problems.found if k == kind])
    console.print(_in_training(found, image_size), soft_wrap=True)
    if sheet is not None:
        console.print(f"The contact sheet is in {sheet}.", soft_wrap=True)
    return None


def _training(found: DataSummary) -> dict[str, Any]:
    """The settings that `train` would choose."""
    from lowrank_cnn.train.recipes import defaults_for

    recipe = defaults_for(found.splits["train"].images)
    return {"batch_size": recipe.batch_size, "epochs": recipe.epochs, "lr": recipe.lr}


def _in_training(found: DataSummary, image_size: str | None) -> str:
    from lowrank_cnn.data.sources import LARGE_SIDE
    from lowrank_cnn.train.recipes import defaults_for, defaults_in_words

    size, images = found.data.train.size, found.splits["train"].images
    if size is not None and image_size is not None:
        sized = f"images are brought to {size[1]}x{size[2]}"
    elif size is None or min(size[1:]) > LARGE_SIDE:
        why = "differ in size" if size is None else "are large"
        sized = f"images {why}, so each is brought to the network's input size (--image-size sets another)"
    else:
        sized = f"images of {size[1]}x{size[2]} stay as they are"
    return f"`lowrank train`: {sized}. {defaults_in_words(defaults_for(images), images)}"


def _print_splits(found: DataSummary) -> None:
    rows = [
        (
            name,
            f"{split.images:,}",
            _most({f"{height}x{width}": n for (height, width), n in split.sizes.most_common()}),
            _most(dict(split.modes.most_common())),
        )
        for name, split in found.splits.items()
    ]
    print_table(f"{found.data.name}, {counted(len(found.data.classes), 'class')}", _COLUMNS, rows)
    if held := found.data.details.get("val_split"):
        console.print(f"There are no test images: {held['share']:.0%} of the images are held out (--val-split).")


_COLUMNS = ("split", "images", "<sizes (height x width)", "<modes")


def _most(counts: dict[str, int], shown: int = 3) -> str:
    """The most frequent values, in the order given."""
    told = [value if len(counts) == 1 else f"{value}: {n:,}" for value, n in list(counts.items())[:shown]]
    return ", ".join(told) + (f", {len(counts) - shown:,} more" if len(counts) > shown else "")


def _print_classes(found: DataSummary) -> None:
    train, test = (Counter(split.classes) for split in found.splits.values())
    ranked = train.most_common()
    rows = [(name, f"{n:,}", f"{test[name]:,}") for name, n in ranked]
    hidden = len(rows) - _MOST_CLASSES
    if hidden > 0:  # both ends tell how even the classes are
        half = _MOST_CLASSES // 2
        rows = [*rows[:half], (f"{counted(hidden, 'class')} between", "", ""), *rows[-half:]]
    print_table("Images of each class", ("class", "train", "test"), rows)
    (most, n), (least, m) = ranked[0], ranked[-1]
    if n > _UNEVEN * m:
        uneven = f"{most} has {counted(n, 'training image')}, {least} {m:,}"
        console.print(f"{uneven}: --set class_weights=balanced lets rare classes count as much.", soft_wrap=True)


def _print_duplicates(found: DataSummary) -> None:
    kinds = {
        ("Leak: {}, trained on as well", "test image"): found.leaks,
        ("{} equal to an earlier one", "training image"): found.repeated["train"],
        ("{} equal to an earlier one", "test image"): found.repeated["test"],
        ("{} of equal images with different labels", "pair"): found.contradictions,
    }
    for (sentence, noun), pairs in kinds.items():
        if pairs:
            told = [f"{one} = {other}" for one, other in pairs]
            _print_list(sentence.format(counted(len(pairs), noun)), told)
    if not any(kinds.values()):
        console.print("No duplicates within or across the splits.")


def _print_list(title: str, names: list[str]) -> None:
    more = [f"... and {len(names) - _SHOWN:,} more (--json lists all)"] if len(names) > _SHOWN else []
    console.print(f"{title}:", soft_wrap=True)
    for name in [*names[:_SHOWN], *more]:
        console.print(f"  {name}", soft_wrap=True)
