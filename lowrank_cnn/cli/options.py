"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lowrank_cnn.cli.source import INTO_HELP, MODEL_HELP

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Into = Annotated[str | None, typer.Option(help=INTO_HELP)]
Input = Annotated[str | None, typer.Option("--input", help="Image size, as 3x224x224.")]
Pretrained = Annotated[
    str | None,
    typer.Option(help="Trained weights: cifar10, ours; default or a name of theirs for timm and torchvision."),
]
Width = Annotated[float | None, typer.Option(help="Scale the filters of one of our networks.")]
Norm = Annotated[str | None, typer.Option(help="batch, for one of our networks.")]

DataPath = Annotated[
    str,
    typer.Option(
        "--data",
        help="A folder of images (CLASS/* or train/CLASS/*), a .csv of paths and labels, a folder of parquet "
        "shards, a Hub repository, or digits.",
    ),
]
TestPath = Annotated[str | None, typer.Option("--test", help="Other images to test on, named as --data is.")]
ValSplit = Annotated[
    float | None, typer.Option(help="Share of each class to test on, where --data has no test images.")
]
ClassNames = Annotated[
    Path | None, typer.Option(help="File with a class folder and the name to show for it in each line.")
]
Channels = Annotated[int | None, typer.Option(help="Read images as grey (1) or in colour (3).")]
Bad = Annotated[Literal["skip", "refuse"], typer.Option(help="What to do with images that cannot be used.")]
Limit = Annotated[int | None, typer.Option(help="Use at most so many images of each split.")]
Size = Annotated[str | None, typer.Option(help="Bring every image to this square (64), or to 48x64.")]
Workers = Annotated[int, typer.Option(help="Processes that decode images, where these are streamed.")]
Decode = Annotated[
    Literal["cpu", "gpu"],
    typer.Option(help="What decodes streamed images to train on; gpu needs CUDA and torchvision."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
