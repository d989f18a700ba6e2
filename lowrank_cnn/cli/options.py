"""Options that several commands share, with one default each."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowrank_cnn.core.errors import LowRankError

if TYPE_CHECKING:
    from lowrank_cnn.cli.source import Source

NETWORK, IMAGES, TRAINING = "Network", "Images", "Training"
"""Panels that group the options in help texts."""


def option(text: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with its help text; its name is that of the parameter unless names are given."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


MODEL_HELP = (
    "A network's name (`lowrank models`), timm:NAME, torchvision:NAME, hf-hub:USER/NAME, an exported "
    ".safetensors, a run's directory, or path.py:function, which runs your file and calls the function."
)
TRAINED_HELP = "A run's directory, checkpoint, exported file (.onnx, ...), hf-hub:USER/NAME, or a network's name."
INPUTS_HELP = "For other inputs than one image: path.py:function, which gives them (tensor, tuple or dictionary)."

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
TrainedModel = Annotated[str, typer.Argument(help=TRAINED_HELP)]
Into = Annotated[str | None, option("Your network before conversion: path.py:function.", panel=NETWORK)]
Input = Annotated[str | None, option("Input size, as 3x224x224.", "--input", panel=NETWORK)]
Inputs = Annotated[str | None, option(INPUTS_HELP, "--example", panel=NETWORK)]
Pretrained = Annotated[str | None, option("Begin with trained weights: the default, or these.", panel=NETWORK)]
PackageWeights = Annotated[str | None, option("The package's weights: cifar10.", "--pretrained", panel=NETWORK)]
Scheme = Annotated[str | None, option("Low-rank scheme to build or convert by.", panel=NETWORK)]
Width = Annotated[float | None, option("Scale the filters of one of our networks.", panel=NETWORK)]
Norm = Annotated[str | None, option("batch, for batch norm in one of our networks.", panel=NETWORK)]
Trusted = Annotated[bool, option("Read a .pt2 or .ts, whose code may run.", "--trusted", panel=NETWORK)]
Output = Annotated[str | None, option("Name or number of the output with the class scores.", panel=NETWORK)]
Settings = Annotated[
    list[str] | None,
    option("Change a field of the recipe; repeatable.", "--set", panel=TRAINING, metavar="<name=value>"),
]
ClassNames = Annotated[Path | None, option("Lines of a class folder, a tab, its name.", panel=IMAGES)]
Bad = Annotated[Literal["skip", "refuse"], option("Skip images that cannot be used, or stop.", panel=IMAGES)]
Limit = Annotated[int | None, option("Use at most this many images of a split.", panel=IMAGES)]
Size = Annotated[str | None, option("Resize every image to 64x64 (64) or 48x64.", panel=IMAGES)]
Workers = Annotated[int, option("Processes that decode streamed images.", panel=IMAGES)]
Device = Annotated[str, option("auto, cpu, cuda, cuda:1 or mps.")]
Batch = Annotated[int, option("Images per batch.", min=1, max=10**6)]
Macs = Annotated[float | None, option("Keep at most this share of the MACs.")]
Latency = Annotated[float | None, option("Keep at most this share of the time, measured here.")]
Overwrite = Annotated[bool, option("Replace a file that exists.", "--overwrite")]
Runs = Annotated[list[Path] | None, option("Folders or files of records; repeatable.", "--runs")]
Json = Annotated[bool, option("Print JSON instead of a table.", "--json")]


def limit_threads(threads: int | None) -> int | None:
    """Limit the threads of OpenMP before torch starts them: on Arm its convs ignore `torch.set_num_threads`."""
    if threads is not None and threads > 0 and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


Threads = Annotated[int | None, option("CPU threads; by default all cores.", max=1024, callback=limit_threads)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: every field of a parameter that is a dataclass becomes an option."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        options = [parameter]
        if is_dataclass(kind := parameter.annotation):
            groups[parameter.name] = kind
            options = list(inspect.signature(kind, eval_str=True).parameters.values())  # type: ignore[arg-type]
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return command(**made, **given)

    del flat.__wrapped__  # typer would read the signature of the function itself
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


@dataclass(frozen=True)
class ImageOptions:
    """How the images of a set are read."""

    bad: Bad = "skip"
    limit: Limit = None
    image_size: Size = None


@dataclass(frozen=True)
class DataOptions:
    """A set of images to train and test on."""

    test: Annotated[str | None, option("Other images to test on.", panel=IMAGES)] = None
    val_split: Annotated[float | None, option("Share to test on if there is no test set.", panel=IMAGES)] = None
    class_names: ClassNames = None
    image_size: Size = None
    limit: Limit = None


@dataclass(frozen=True)
class SourceOptions:
    """How the network that a command names is built, and the size of its input."""

    input_text: Input = None
    pretrained: Pretrained = None
    width: Width = None
    norm: Norm = None
    into: Into = None

    def find(
        self, model: str, example: str | None = None, *, scheme: str | None = None, batch: int = 1
    ) -> tuple[Source, Any]:
        """The network, and the size of its images or the inputs that --example gives."""
        from lowrank_cnn.cli.source import find_example, find_model, parse_size

        if example is not None and (self.input_text is not None or batch != 1):
            option = "--batch" if self.input_text is None else "--input"
            raise LowRankError(f"--example gives all inputs with their batch: leave {option} out.")
        given = {"pretrained": self.pretrained, "width": self.width, "norm": self.norm}
        source = find_model(model, into=self.into, scheme=scheme, **given)
        return source, find_example(example) if example else source.size(parse_size(self.input_text))
