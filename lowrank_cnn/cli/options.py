"""Options that several commands share, with one default each."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from lowrank_cnn.core.errors import LowRankError

if TYPE_CHECKING:
    from lowrank_cnn.cli.source import Source

NETWORK, IMAGES, TRAINING = "Network", "Images", "Training"
"""Panels that group the options in help texts."""

MODEL_HELP = (
    "A network's name (`lowrank models`), timm:NAME, torchvision:NAME, hf-hub:USER/NAME, an exported "
    ".safetensors, a run's directory, or path.py:function, which runs your file and calls the function."
)
TRAINED_HELP = (
    "A run's directory, a checkpoint, an exported file (.onnx, .safetensors, ...), hf-hub:USER/NAME, or a "
    "network's name."
)

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
TrainedModel = Annotated[str, typer.Argument(help=TRAINED_HELP)]
Into = Annotated[
    str | None,
    typer.Option(
        help="For weights of your own network: that network before conversion, as path.py:function.",
        rich_help_panel=NETWORK,
    ),
]
Input = Annotated[str | None, typer.Option("--input", help="Input size, as 3x224x224.", rich_help_panel=NETWORK)]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--example",
        help="For other inputs than one image: path.py:function, which gives them (tensor, tuple or dictionary).",
        rich_help_panel=NETWORK,
    ),
]
Pretrained = Annotated[
    str | None,
    typer.Option(
        help="Trained weights: cifar10 for ours; default or a name for timm and torchvision.",
        rich_help_panel=NETWORK,
    ),
]
PackageWeights = Annotated[
    str | None,
    typer.Option(
        "--pretrained", help="Use the weights that come with the package: cifar10.", rich_help_panel=NETWORK
    ),
]
Scheme = Annotated[
    str | None,
    typer.Option(help="Convert the network by this scheme first, with fresh weights.", rich_help_panel=NETWORK),
]
Width = Annotated[
    float | None, typer.Option(help="Scale the number of filters of one of our networks.", rich_help_panel=NETWORK)
]
Norm = Annotated[
    str | None, typer.Option(help="batch, for batch norm in one of our networks.", rich_help_panel=NETWORK)
]
Trusted = Annotated[
    bool,
    typer.Option("--trusted", help="Read a .pt2 or .ts, whose code may run.", rich_help_panel=NETWORK),
]
Output = Annotated[
    str | None,
    typer.Option(help="Name or number of the output with the class scores, of several.", rich_help_panel=NETWORK),
]
Stride = Annotated[int | None, typer.Option(help="Stride of the first conv.", rich_help_panel=NETWORK)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a field of the recipe, as field=value; repeatable.", rich_help_panel=TRAINING
    ),
]

DataPath = Annotated[
    str,
    typer.Option(
        "--data",
        help="A folder of images (CLASS/* or train/CLASS/*), a .csv of paths and labels, a folder of parquet "
        "shards, a Hub repository, or digits.",
        rich_help_panel=IMAGES,
    ),
]
TestPath = Annotated[
    str | None, typer.Option("--test", help="Other images to test on, named as --data is.", rich_help_panel=IMAGES)
]
ValSplit = Annotated[
    float | None,
    typer.Option(help="Share of each class to test on, if --data has no test images.", rich_help_panel=IMAGES),
]
ClassNames = Annotated[
    Path | None,
    typer.Option(
        help="File with a class folder, a tab or comma, and the name to show for it in each line.",
        rich_help_panel=IMAGES,
    ),
]
Channels = Annotated[
    int | None, typer.Option(help="Read images as grey (1) or in colour (3).", rich_help_panel=IMAGES)
]
Bad = Annotated[
    Literal["skip", "refuse"],
    typer.Option(help="What to do with images that cannot be used.", rich_help_panel=IMAGES),
]
Missing = Annotated[
    Literal["skip", "refuse"], typer.Option(help="What to do if a shard is missing.", rich_help_panel=IMAGES)
]
Hold = Annotated[
    float,
    typer.Option("--hold-gb", min=0, help="Hold sets of this size in memory.", rich_help_panel=IMAGES),
]
Limit = Annotated[
    int | None, typer.Option(help="Use at most this many images of each split.", rich_help_panel=IMAGES)
]
Size = Annotated[
    str | None, typer.Option(help="Resize every image to this square (64), or to 48x64.", rich_help_panel=IMAGES)
]
Workers = Annotated[int, typer.Option(help="Processes that decode streamed images.", rich_help_panel=IMAGES)]
Decode = Annotated[
    Literal["cpu", "gpu"],
    typer.Option(
        help="Where streamed training images are decoded; gpu needs CUDA and torchvision.", rich_help_panel=IMAGES
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Train through torch.compile; by default where that is faster.",
        rich_help_panel=TRAINING,
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--checkpoint-activations",
        help="Save memory: recompute activations in the backward pass.",
        rich_help_panel=TRAINING,
    ),
]
Runs = Annotated[list[Path] | None, typer.Option("--runs", help="Folders or files of records; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: every field of a parameter that is a dataclass becomes an option."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if parameter.name in groups:
            inner = get_type_hints(hint, include_extras=True)
            parameters += [_keyword(field.name, inner[field.name], field.default) for field in fields(hint)]
        else:
            parameters.append(_keyword(parameter.name, hint, parameter.default))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return command(**made, **given)

    del flat.__wrapped__  # typer would read the signature of the function itself
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


@dataclass(frozen=True)
class SourceOptions:
    """How the network that a command names is built, and the size of its input."""

    input_text: Input = None
    pretrained: Pretrained = None
    width: Width = None
    norm: Norm = None
    into: Into = None

    def find(self, model: str, *, scheme: str | None = None) -> tuple[Source, tuple[int, ...]]:
        """The network and the size of its input."""
        from lowrank_cnn.cli.source import parse_size

        source = self.source(model, scheme=scheme)
        return source, source.size(parse_size(self.input_text))

    def find_inputs(
        self, model: str, example: str | None, *, scheme: str | None = None, batch: int = 1
    ) -> tuple[Source, tuple[int, ...] | None, Any]:
        """The network, and the size of its images or (None for that) the inputs that --example names."""
        from lowrank_cnn.cli.source import find_example

        if example is None:
            return *self.find(model, scheme=scheme), None
        if self.input_text is not None or batch != 1:
            option = "--batch" if self.input_text is None else "--input"
            raise LowRankError(f"--example gives all inputs with their batch: leave {option} out.")
        return self.source(model, scheme=scheme), None, find_example(example)

    def words(self, model: str, *, scheme: str | None = None) -> str:
        """The network and these options, as they are typed in a shell."""
        given = {"--input": self.input_text, "--scheme": scheme, "--pretrained": self.pretrained}
        given |= {"--width": self.width, "--norm": self.norm, "--into": self.into}
        options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        return shlex.join([model, *options])

    def source(self, model: str, *, scheme: str | None = None) -> Source:
        """The network, whatever its input."""
        from lowrank_cnn.cli.source import find_model

        given = {"pretrained": self.pretrained, "width": self.width, "norm": self.norm}
        return find_model(model, into=self.into, scheme=scheme, **given)
