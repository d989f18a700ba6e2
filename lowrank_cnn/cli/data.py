"""The command `lowrank data`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.options import DataOptions, Json, Overwrite, grouped, option
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.text import counted

if TYPE_CHECKING:
    from lowrank_cnn.data.inspect import DataSummary
    from lowrank_cnn.train.recipe import Recipe

_MOST_NAMES, _MOST_CLASSES, _UNEVEN = 10, 40, 3
"""Names of a list, rows of the table of classes, and the ratio of class sizes that is worth a sentence."""


@grouped
def data_command(
    images: Annotated[str, typer.Argument(help="Folder, .csv, shards, Hub name or digits.")],
    reading: DataOptions,
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
    from lowrank_cnn.data.inspect import check_sheet, write_contact_sheet
    from lowrank_cnn.train.recipes import defaults_for

    if sheet is not None:
        check_sheet(sheet, overwrite=overwrite)
    found = lr.inspect_data(images, **vars(reading), progress=not as_json)
    if sheet is not None:
        write_contact_sheet(found.data, sheet)
    recipe = defaults_for(found.train.images)
    if as_json:
        training = {name: getattr(recipe, name) for name in ("batch_size", "epochs", "lr")}
        return print_json(found.to_dict() | {"training": training, "sheet": sheet and str(sheet)})
    splits = (("train", found.train), ("test", found.test))
    rows = [(name, f"{one.images:,}", _most(one.sizes), _most(one.modes)) for name, one in splits]
    title = f"{found.data.name}, {counted(len(found.data.classes), 'class')}"
    print_table(title, ("split", "images", "<height x width", "<modes"), rows)
    fewest = sorted(found.train.classes.items(), key=lambda row: row[1])
    rows = [(name, f"{n:,}", f"{found.test.classes[name]:,}") for name, n in fewest[:_MOST_CLASSES]]
    rows += [(f"and {len(fewest) - _MOST_CLASSES:,} more", "", "")] if len(fewest) > _MOST_CLASSES else []
    print_table("Images of each class, the fewest first", ("class", "train", "test"), rows)
    for line in (*_findings(found), _in_training(found, recipe, reading.image_size)):
        console.print(line, soft_wrap=True)
    if sheet is not None:
        console.print(f"The contact sheet is in {sheet}.", soft_wrap=True)
    return None


def _most(counts: Counter[str], shown: int = 3) -> str:
    """The most frequent values."""
    told = [value if len(counts) == 1 else f"{value}: {n:,}" for value, n in counts.most_common(shown)]
    return ", ".join(told) + (f", {len(counts) - shown:,} more" if len(counts) > shown else "")


def _findings(found: DataSummary) -> Iterator[str]:
    """Sentences about the split, the classes, duplicates and problems, each with the names of images."""
    if held := found.data.details.get("val_split"):
        yield f"There are no test images: {held['share']:.0%} of the images are held out (--val-split)."
    ranked = Counter(found.train.classes).most_common()
    (most, many), (least, few) = ranked[0], ranked[-1]
    if many > _UNEVEN * few:
        uneven = f"{most} has {counted(many, 'training image')}, {least} {few:,}"
        yield f"{uneven}: with the recipe's class_weights=balanced, rare classes count as much."
    kinds = {
        ("Leak: {}, trained on as well", "test image"): found.leaks,
        ("{} equal to an earlier one", "training image"): found.train.repeated,
        ("{} equal to an earlier one", "test image"): found.test.repeated,
        ("{} of equal images with different labels", "pair"): found.contradictions,
    }
    for (sentence, noun), pairs in kinds.items():
        if pairs:
            yield from _listed(sentence.format(counted(len(pairs), noun)), [" = ".join(pair) for pair in pairs])
    if not any(kinds.values()):
        yield "No duplicates within or across the splits."
    for name, split in (("train", found.train), ("test", found.test)):
        for kind, count in Counter(kind for kind, _ in split.problems).items():
            named = [where for known, where in split.problems if known == kind]
            yield from _listed(f"{name}: {counted(count, kind)}", named)


def _listed(title: str, names: Sequence[str]) -> Iterator[str]:
    yield f"{title}:"
    yield from (f"  {name}" for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        yield f"  ... and {len(names) - _MOST_NAMES:,} more (--json lists all)"


def _in_training(found: DataSummary, recipe: Recipe, image_size: str | None) -> str:
    """What `train` would do with the images."""
    from lowrank_cnn.data.sources import LARGE_SIDE
    from lowrank_cnn.train.recipes import defaults_in_words

    size = found.data.train.size
    if size is not None and (image_size is not None or min(size[1:]) <= LARGE_SIDE):
        sized = f"{'are brought to' if image_size else 'keep their size,'} {size[1]}x{size[2]}"
    else:
        why = "differ in size" if size is None else "are large"
        sized = f"{why}, so they are brought to the network's input size (--image-size sets another)"
    return f"`lowrank train`: images {sized}. {defaults_in_words(recipe, found.train.images)}"
