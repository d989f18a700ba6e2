"""Where a command takes its network from: our own names, timm, torchvision, a file of the user's, a run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.errors import LowRankError, nearest, require
from lowrank_cnn.models import create_model, list_models

MODEL_HELP = (
    "A network's name (`lowrank models`), timm:NAME, torchvision:NAME, an exported .safetensors, a run's "
    "directory, or path.py:function, which runs that file of yours and calls the function."
)

Size = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A network, and the size of the images it takes where that is known."""

    name: str
    network: nn.Module
    input_size: Size | None

    def size(self, asked: Size | None) -> Size:
        size = asked or self.input_size
        if size is None:
            raise LowRankError(f"{self.name} does not say what images it takes: give --input, like 3x224x224.")
        return size


def find_model(text: str, *, pretrained: bool = False, **options: Any) -> Source:
    """The network that a text names; the options are those of `create_model`, for our own networks."""
    kind, colon, rest = text.partition(":")
    makers: dict[str, Callable[[str, bool], Source]] = {"timm": _from_timm, "torchvision": _from_torchvision}
    if colon and kind in makers:
        return makers[kind](rest, pretrained)
    if colon and kind.endswith(".py"):
        return _from_file(Path(kind), rest)
    if Path(text).suffix == ".safetensors":
        from lowrank_cnn.deploy.export import load

        network = load(text)
        return Source(Path(text).stem, network, getattr(network, "input_size", None))
    if Path(text).is_dir():
        from lowrank_cnn.evaluation import load_checkpoint

        network = load_checkpoint(text).network
        return Source(Path(text).name, network, getattr(network, "input_size", None))
    if colon or Path(text).suffix in (".py", ".pt", ".pth", ".bin"):
        raise LowRankError(f"{text!r} names no network: write path.py:function, timm:NAME or torchvision:NAME.")
    network = create_model(text, **{key: value for key, value in options.items() if value is not None})
    return Source(text, network, network.input_size)


def parse_size(text: str | None) -> Size | None:
    """An image size written CHANNELSxHEIGHTxWIDTH."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise LowRankError(f"an input size is written CHANNELSxHEIGHTxWIDTH, like 3x224x224, not {text!r}.")
    return tuple(map(int, match.groups()))


def is_ours(text: str) -> bool:
    return text in list_models()


def _from_timm(name: str, pretrained: bool) -> Source:
    timm: Any = require("timm", extra="zoo", purpose=f"timm:{name}")
    if name not in timm.list_models():
        raise LowRankError(f"timm has no network {name!r}; {nearest(name, timm.list_models())}")
    network = timm.create_model(name, pretrained=pretrained)
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", {})
    size = config.get("input_size")
    return Source(f"timm:{name}", network, tuple(size) if size else None)


def _from_torchvision(name: str, pretrained: bool) -> Source:
    models: Any = require("torchvision.models", extra="zoo", purpose=f"torchvision:{name}")
    if name not in models.list_models():
        raise LowRankError(f"torchvision has no network {name!r}; {nearest(name, models.list_models())}")
    return Source(
        f"torchvision:{name}", models.get_model(name, weights="DEFAULT" if pretrained else None), (3, 224, 224)
    )


def _from_file(path: Path, function: str) -> Source:
    """Run the user's own file, as they asked, and call the function it defines."""
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        raise LowRankError(f"{path} does not run: {type(error).__name__}: {error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise LowRankError(f"{path} has no function {function!r}.")
    network = make()
    if not isinstance(network, nn.Module):
        raise LowRankError(f"{function} in {path} gives a {type(network).__name__}, not a network.")
    return Source(f"{path.name}:{function}", network, getattr(network, "input_size", None))
